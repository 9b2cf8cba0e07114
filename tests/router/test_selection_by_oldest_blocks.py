"""PrefixAware follows what engines report of their oldest blocks."""

from collections.abc import Callable

import pytest

from cleave.policy.prefix_cache import CLOCK_TOKENS
from cleave.router.prefix_index import PrefixMemory
from cleave.router.router import Router
from cleave.router.shared_load import SharedLoad, build_table

from tests.support.cached_prompts import make_text, serve

MIXED = {"m1": "mixed"}
TOKENS = 1_024
KV_TOKENS = 16_000


@pytest.fixture
def report(loaded, clock) -> Callable[..., None]:
    """Sends a report of `m1` that its oldest block was used so many s ago; None: it has none."""

    def send(router: Router, age_s: float | None, **more: object) -> None:
        age_ms = 0 if age_s is None else round(1_000 * age_s)
        event = loaded("m1", oldest_kv_ms=age_ms, **more)
        router.registry.on_event("m1", event, clock.now_s)

    return send


def send_others(router: Router, clock, report, tokens: int, **load: object) -> None:
    """Other prompts, one each 10 s, with a report before each."""
    for number in range(tokens // TOKENS):
        clock.now_s += 10.0
        report(router, None, **load)
        serve(router, make_text(1_000 + number, TOKENS))
    clock.now_s += 10.0


def compute(router: Router, seed: int = 1) -> float:
    """Tokens of that prompt that are expected to be computed."""
    return serve(router, make_text(seed, TOKENS))[1]


def test_a_cache_that_evicts_early_is_not_believed_to_have_more(routed, clock, report) -> None:
    router = routed(MIXED)
    compute(router)
    send_others(router, clock, report, 8 * TOKENS)
    assert KV_TOKENS > 9 * TOKENS
    report(router, 25.0)
    assert compute(router) == TOKENS
    assert compute(router, 1_007) == 0, "sent 10 s ago"
    assert compute(router, 1_002) == TOKENS, "sent 60 s ago"


def test_a_long_request_makes_no_cache_believed_to_have_more(routed, clock, report) -> None:
    router = routed(MIXED)
    compute(router)
    send_others(router, clock, report, 20 * TOKENS)
    report(router, 500.0)
    assert compute(router) == TOKENS, "as much as the KV holds was written since"


def test_only_the_latest_report_counts(routed, clock, report) -> None:
    router = routed(MIXED)
    compute(router)
    send_others(router, clock, report, 8 * TOKENS)
    report(router, 1.0)
    instance = router.registry.instances["m1"]
    assert instance.horizon > 0
    report(router, 95.0)
    assert instance.horizon == 0
    report(router, 1.0)
    report(router, None)
    assert compute(router) == 0, "as much as the KV holds is believed again"


def test_what_waited_there_was_used_later_than_it_was_sent(routed, clock, report) -> None:
    router = routed(MIXED)
    # 0.1 ms a token before anything is learned: 20 s.
    report(router, None, prompt=200_000)
    send_others(router, clock, report, 8 * TOKENS, prompt=200_000)
    report(router, 15.0)
    assert compute(router, 1_004) == 0, "sent 40 s ago, begun 20 s ago"
    assert compute(router, 1_001) == TOKENS


def test_instances_that_only_prefill_keep_what_their_kv_holds(routed, clock, report) -> None:
    router = routed({"m1": "prefill", "d1": "decode"})
    compute(router)
    send_others(router, clock, report, 8 * TOKENS)
    report(router, 25.0)
    assert compute(router) == 0


def test_the_first_prompts_of_a_boot_are_not_evicted(routed, make_event, clock, report) -> None:
    router = routed(MIXED)
    send_others(router, clock, report, 8 * TOKENS)
    report(router, 15.0)
    event = make_event("m1", "mixed", boot_id="m1-second")
    router.registry.on_event("m1", event, clock.now_s)
    instance = router.registry.instances["m1"]
    assert instance.horizon < 0
    compute(router)
    clock.now_s += 0.2
    # The oldest block is one of a test of the KV path.
    report(router, 0.3, boot_id="m1-second")
    assert instance.horizon < 0
    assert compute(router) == 0


def test_a_process_that_starts_later_takes_nothing_older_for_evicted(
    routed, make_event, clock, report
) -> None:
    table, memory = build_table(2), PrefixMemory()

    first = routed(MIXED, shared_load=SharedLoad(table.for_process(0)), memory=memory)
    compute(first)
    send_others(first, clock, report, 8 * TOKENS)
    second = routed({}, shared_load=SharedLoad(table.for_process(1)), memory=memory)
    for name, role in MIXED.items():
        second.registry.on_event(name, make_event(name, role), clock.now_s)
    report(first, 60.0)
    report(second, 60.0)
    late = second.registry.instances["m1"]
    assert late.in_flight.read_clock() > 9 * TOKENS // CLOCK_TOKENS, "shared"
    assert first.registry.instances["m1"].horizon > 0 > late.horizon
    assert compute(second, 1_001) == 0, "known by the KV's size"
    clock.now_s += 100.0
    report(second, 50.0)
    assert late.horizon > 0
    table.close()
