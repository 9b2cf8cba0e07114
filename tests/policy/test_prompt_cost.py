import math

import numpy as np
import pytest

from cleave.policy.dispatch import NONE, RESIDENT_WEIGHT
from cleave.policy.prompt_cost import find_least_cost, predict_cost_ms, predict_wait_ms

NOW_MS = 1_000.0


def choose(
    ends_ms: list[float],
    candidates: dict[int, float],
    tokens: float = 1_000.0,
    token_ms: float = 0.1,
) -> int:
    """The slot of prefill instances whose queues end at `ends_ms`; `candidates`: cached tokens."""
    scores = np.array(ends_ms)
    slots, cached = list(candidates), list(candidates.values())
    speeds = [token_ms] * len(slots)
    return find_least_cost(slots, cached, speeds, scores, scores, tokens, True, NOW_MS)


def test_the_cost_is_the_wait_and_the_time_of_what_is_not_cached() -> None:
    assert predict_cost_ms(50.0, 300.0, 0.1) == pytest.approx(80.0)


def test_more_cached_tokens_than_the_prompt_has_cost_nothing_more() -> None:
    assert predict_cost_ms(50.0, -3.0, 0.1) == 50.0


def test_a_queue_that_is_through_is_no_wait() -> None:
    assert predict_wait_ms(900.0, 0.0, True, NOW_MS, 0.1) == 0.0
    assert predict_wait_ms(1_200.0, 0.0, True, NOW_MS, 0.1) == 200.0


def test_on_mixed_instances_resident_tokens_count_less_than_waiting_ones() -> None:
    wait_ms = predict_wait_ms(5_000.0, 1_000.0, False, NOW_MS, 0.1)
    assert wait_ms == pytest.approx(100.0 + RESIDENT_WEIGHT * 400.0)


def test_a_prompt_goes_where_it_is_cached_while_waiting_there_is_shorter_than_computing_it() -> (
    None
):
    # 800 cached tokens save 80 ms.
    assert choose([0.0, NOW_MS + 79], {0: 0.0, 1: 800.0}) == 1
    assert choose([0.0, NOW_MS + 81], {0: 0.0, 1: 800.0}) == 0


def test_among_idle_instances_the_one_that_caches_most_is_chosen() -> None:
    assert choose([3e-9, 5e-9, 1e-9], {2: 0.0, 1: 900.0, 0: 400.0}) == 1


def test_of_equal_costs_the_least_score_is_chosen() -> None:
    assert choose([NOW_MS + 5, NOW_MS + 5], {1: 0.0, 0: 0.0}) == 1


def test_a_faster_instance_needs_fewer_cached_tokens() -> None:
    scores = np.array([0.0, 0.0])
    slot = find_least_cost([0, 1], [0.0, 400.0], [0.05, 0.1], scores, scores, 1_000.0, True, NOW_MS)
    assert slot == 0


def test_closed_instances_are_not_chosen() -> None:
    assert choose([math.inf, NOW_MS], {0: 900.0, 1: 0.0}) == 1
    assert choose([math.inf], {0: 900.0}) == NONE
