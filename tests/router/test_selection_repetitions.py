"""After how long prompts repeat, as the router counts it."""

import math

import pytest

from cleave.api.enums import DispatchPolicy
from cleave.policy.reuse_times import BOUNDS_S
from cleave.router.prefix_index import PrefixMemory
from cleave.router.registry import InstanceRegistry
from cleave.router.router import Router

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
