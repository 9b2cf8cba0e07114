"""After how long prompts repeat, as the router counts it."""

import math

import pytest

from cleave.api.enums import DispatchPolicy
from cleave.router.prefix_index import LAST_USES_BYTES, PrefixMemory
from cleave.router.registry import InstanceRegistry
from cleave.router.reuse_times import BOUNDS_S, LastUses, ReuseTimes
from cleave.router.router import Router
from cleave.router.routing_request import RoutingRequest

from tests.support.cached_prompts import MIXED, make_text, send, serve


def group(router) -> dict[float, float]:
    """Tokens by the bound of their time, without those of none."""
    tokens = router.reuse_times["m"].to_list()
    return {bound: each for bound, each in zip((*BOUNDS_S, math.inf), tokens, strict=True) if each}


def test_the_next_turn_counts_after_the_time_since_the_one_before(routed, clock) -> None:
    router = routed(MIXED)
    text = make_text(1, 2_048)
    serve(router, text)
    assert group(router) == {math.inf: 2_048}
    clock.now_s += 100
    serve(router, text[:-1] + make_text(2, 512))
    found = group(router)
    assert found.pop(math.inf) == pytest.approx(2_048 + 512, abs=256)
    assert found == {128.0: pytest.approx(2_048, abs=256)}


def test_a_system_prompt_counts_after_the_last_request_and_the_rest_after_the_last_turn(
    routed, clock
) -> None:
    router = routed(MIXED)
    system = make_text(0, 2_000)[:-1]
    text = system + make_text(1, 4_000)
    serve(router, text)
    for number in range(2, 12):
        clock.now_s += 10
        serve(router, system + make_text(number, 4_000))
    before = group(router)
    serve(router, text)
    found = {bound: each - before.get(bound, 0.0) for bound, each in group(router).items()}
    # The system prompt ends in the eighth block.
    assert found[0.5] == pytest.approx(7 * 256, abs=1)
    assert found[128.0] == pytest.approx(6_000 - 7 * 256, abs=256)
    assert sum(found.values()) == pytest.approx(6_000, abs=1)


def test_short_prompts_are_new(routed) -> None:
    router = routed(MIXED)
    for _ in range(3):
        serve(router, make_text(1, 200))
    assert group(router) == {math.inf: 600}


def test_a_retry_is_no_repetition(routed) -> None:
    router = routed(MIXED)
    text = make_text(1, 1_024)
    send(router, text)
    send(router, text, excluded={"m1"})
    assert group(router) == {math.inf: 1_024}


def test_policies_that_do_not_look_at_prompts_count_nothing(make_event) -> None:
    registry = InstanceRegistry(DispatchPolicy.SHORTEST_WAIT)
    registry.on_event("m1", make_event("m1", "mixed"), 0.0)
    router = Router(registry, seed=1)
    serve(router, make_text(1, 1_024))
    assert not router.reuse_times


def test_processes_count_each_others_prompts_as_known(routed, clock) -> None:
    memory = PrefixMemory()
    first, second = routed(MIXED, memory=memory), routed(MIXED, memory=memory)
    text = make_text(1, 1_024)
    serve(first, text)
    clock.now_s += 3
    serve(second, text)
    assert group(second)[4.0] == pytest.approx(1_024, abs=256)


def test_memory_is_constant_and_what_was_used_longest_ago_counts_as_new() -> None:
    uses, times = LastUses(PrefixMemory()), ReuseTimes()
    cells = LAST_USES_BYTES // 8
    for number in range(2 * cells):
        uses.record(prompt(number, known=0), float(number), times)
    now_s = 2.0 * cells
    counted = ReuseTimes()
    for number in (*range(500), *range(2 * cells - 500, 2 * cells)):
        uses.record(prompt(number, known=1), now_s, counted)
    tokens = counted.to_list()
    assert tokens[-1] > 0.9 * 500 * 400, "the first ones"
    assert sum(tokens) == pytest.approx(1_000 * 400)
    assert sum(tokens[:11]) > 0.6 * 500 * 400, "the last ones"


def prompt(number: int, known: int) -> RoutingRequest:
    """One of a single block."""
    request = RoutingRequest(400, 1.0)
    request.blocks, request.known = [number * 0x9E3779B1 & 0xFFFFFFFF], known
    request.text_bytes = 1_025
    return request


def test_counts_of_processes_are_added_where_they_are_counted() -> None:
    one, other = ReuseTimes(), ReuseTimes()
    one.add(3.0, 4)
    other.add(4.0, 5)
    other.add_new(5.0)
    seen = one.to_list()
    one.merge(other.to_list())
    assert (seen[0], seen[1], seen[-1]) == (3.0, 4.0, 5.0)
