import math
import random

import pytest

from cleave.policy.dispatch import NONE, RESIDENT_WEIGHT
from cleave.policy.prompt_cost import (
    MAX_COMPARED,
    PromptView,
    count_mixed,
    find_cheapest,
    predict_cost_ms,
    predict_queue_ms,
)

TOKENS, BLOCK, TOKEN_MS = 1_000.0, 100, 0.1


LOAD_MS = 3.0
"""Of one block in host memory; computing it takes 10 ms."""


class View(PromptView):
    """Instances with waits in ms and cached blocks, of a prompt of ten blocks. `on_gpu`: how many
    of them are not in host memory only."""

    def __init__(
        self, waits_ms: list[float], depths: list[int], on_gpu: list[int] | None = None
    ) -> None:
        self.waits_ms, self.depths = waits_ms, depths
        self.on_gpu = on_gpu or depths
        self.compared = 0

    def find_depth(self, request: int, purpose: int, slot: int) -> int:
        return self.depths[slot]

    def find_holder(self, request: int, purpose: int, depth: int, after: int) -> int:
        for slot in range(after + 1, len(self.depths)):
            if self.depths[slot] >= depth and self.waits_ms[slot] < math.inf:
                return slot
        return NONE

    def get_holder(self, handle: int) -> int:
        return handle

    def has_load(self, request: int, slot: int, depth: int) -> bool:
        return depth > self.on_gpu[slot]

    def predict_at(self, request: int, purpose: int, slot: int, depth: int) -> float:
        self.compared += 1
        load_ms = LOAD_MS * max(depth - self.on_gpu[slot], 0)
        return predict_cost_ms(self.waits_ms[slot], TOKENS - BLOCK * depth, 0.0, TOKEN_MS, load_ms)

    def predict_bound(self, request: int, purpose: int, least: int, depth: int) -> float:
        return predict_cost_ms(self.waits_ms[least], TOKENS - BLOCK * depth, 0.0, TOKEN_MS, 0.0)


def choose(waits_ms: list[float], depths: list[int], on_gpu: list[int] | None = None) -> int:
    view = View(waits_ms, depths, on_gpu)
    least = min(range(len(waits_ms)), key=lambda slot: waits_ms[slot])
    return find_cheapest(view, 0, 0, least, least, max(depths))


def test_the_cost_is_the_wait_and_the_time_of_what_is_not_cached() -> None:
    assert predict_cost_ms(50.0, 300.0, 4.0, 0.1, 0.0) == pytest.approx(84.0)
    assert predict_cost_ms(50.0, 300.0, 4.0, 0.1, 7.0) == pytest.approx(91.0), "copied back"


def test_more_cached_tokens_than_the_prompt_has_cost_nothing_more() -> None:
    assert predict_cost_ms(50.0, -3.0, 4.0, 0.1, 0.0) == 54.0


def test_a_queue_ends_when_it_was_predicted_to_end_unless_it_is_overdue() -> None:
    assert predict_queue_ms(900.0, 0.0, 1_000.0, 0.1) == 0.0
    assert predict_queue_ms(1_200.0, 500.0, 1_000.0, 0.1) == 200.0
    assert predict_queue_ms(900.0, 500.0, 1_000.0, 0.1) == 50.0


def test_on_mixed_instances_resident_tokens_count_less_than_waiting_ones() -> None:
    assert count_mixed(1_000.0, 5_000.0) == pytest.approx(1_000 + RESIDENT_WEIGHT * 4_000)
    assert count_mixed(1_000.0, math.inf) == math.inf, "closed"


def test_a_prompt_goes_where_it_is_cached_while_waiting_there_is_shorter_than_computing_it() -> (
    None
):
    # 8 cached blocks save 80 ms.
    assert choose([0.0, 79.0], [0, 8]) == 1
    assert choose([0.0, 81.0], [0, 8]) == 0


def test_among_idle_instances_the_one_that_caches_most_is_chosen() -> None:
    assert choose([0.0, 0.0, 0.0], [4, 9, 0]) == 1


def test_of_equal_costs_the_first_is_chosen() -> None:
    assert choose([5.0, 5.0], [0, 0]) == 0
    assert choose([5.0, 15.0], [1, 2]) == 0


def test_a_pinned_instance_is_left_for_another_that_caches_as_much() -> None:
    view = View([50.0, 0.0, 20.0], [9, 0, 9])
    assert find_cheapest(view, 0, 0, 0, 1, 9) == 2


def test_a_pinned_instance_is_kept_while_it_costs_less_than_the_least_one() -> None:
    view = View([5.0, 0.0], [9, 8])
    assert find_cheapest(view, 0, 0, 0, 1, 9) == 0
    view = View([15.0, 0.0], [9, 8])
    assert find_cheapest(view, 0, 0, 0, 1, 9) == 1


def test_closed_instances_are_not_chosen() -> None:
    assert choose([5.0, math.inf], [0, 9]) == 0


def test_a_search_stops_where_no_other_can_cost_less() -> None:
    view = View([0.0, 1.0, 2.0], [0, 9, 8])
    assert find_cheapest(view, 0, 0, 0, 0, 9) == 1
    assert view.compared == 1


def test_copying_back_counts_and_a_gpu_that_has_as_much_is_preferred() -> None:
    # 9 blocks take 27 ms to copy back and 90 ms to compute.
    assert choose([0.0, 20.0], [9, 9], [0, 9]) == 1
    assert choose([0.0, 28.0], [9, 9], [0, 9]) == 0
    assert choose([0.0, 50.0], [0, 9], [0, 0]) == 1
    assert choose([0.0, 70.0], [0, 9], [0, 0]) == 0


@pytest.mark.parametrize("has_host_memory", [False, True])
def test_ten_thousand_searches_find_the_least_cost_of_all_instances(has_host_memory) -> None:
    rng = random.Random(7)
    for _ in range(10_000):
        waits_ms = [rng.choice([0.0, 10.0 * rng.randrange(12), math.inf]) for _ in range(4)]
        depths = [rng.choice([0, 0, rng.randrange(6)]) for _ in range(4)]
        if min(waits_ms) == math.inf:
            continue
        on_gpu = [rng.randint(0, each) for each in depths] if has_host_memory else depths
        view = View(waits_ms, depths, on_gpu)
        costs = [view.predict_at(0, 0, slot, depths[slot]) for slot in range(4)]
        assert costs[choose(waits_ms, depths, on_gpu)] == min(costs)


def test_a_search_has_a_bound() -> None:
    count = 10 * MAX_COMPARED
    view = View([0.0, *[500.0] * count], [0, *[9] * count])
    assert find_cheapest(view, 0, 0, 0, 0, 9) == 0
    assert view.compared == 1 + MAX_COMPARED
