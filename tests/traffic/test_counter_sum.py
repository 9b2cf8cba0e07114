"""Gateways that come, go and begin anew, as one that never does."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from cleave.traffic.counter_sum import MISSING_TIMEOUT_S, CounterSum
from cleave.traffic.counters import Buckets, GatewayCounters

A, B = "10.0.0.1", "10.0.0.2"


def page(requests: float, started_s: float = 100.0, **other: float) -> GatewayCounters:
    ttft = Buckets((0.1, float("inf")), (requests / 2, requests))
    return replace(GatewayCounters(started_s=started_s, requests=requests, ttft=ttft), **other)


def look(total: CounterSum, at_s: float, **pages: GatewayCounters) -> CounterSum:
    named = {{"a": A, "b": B}[name]: each for name, each in pages.items()}
    return total.add(frozenset(named), named, at_s)


def test_what_was_counted_before_the_first_look_does_not_count() -> None:
    first = look(CounterSum(), 1.0, a=page(70))
    assert first.counts is not None
    assert (first.counts.at_s, first.counts.requests) == (1.0, 0)
    second = look(first, 16.0, a=page(75), b=page(1000))
    assert second.counts is not None
    assert (second.counts.at_s, second.counts.requests) == (16.0, 5)
    assert second.counts.ttft.counts == (2.5, 5)


def test_a_gateway_that_begins_anew_counts_from_nothing() -> None:
    total = look(look(CounterSum(), 1.0, a=page(70)), 2.0, a=page(6, started_s=200))
    assert total.counts is not None
    assert total.counts.requests == 6


def test_a_clock_that_is_set_by_a_second_is_no_restart() -> None:
    total = look(look(CounterSum(), 1.0, a=page(70)), 2.0, a=page(76, started_s=101))
    assert total.counts is not None
    assert total.counts.requests == 6


def test_a_gateway_that_is_silent_is_waited_for_and_then_done_without() -> None:
    before = look(CounterSum(), 0.0, a=page(10), b=page(10))
    both = frozenset({A, B})
    assert before.add(both, {A: page(14)}, 15.0) is before
    late = before.add(both, {A: page(20)}, MISSING_TIMEOUT_S)
    assert late.counts is not None
    assert late.counts.requests == 10
    back = late.add(both, {A: page(20), B: page(13)}, MISSING_TIMEOUT_S + 15)
    assert back.counts is not None
    assert back.counts.requests == 13


def test_a_gateway_that_has_gone_is_not_waited_for() -> None:
    before = look(CounterSum(), 0.0, a=page(10), b=page(10))
    after = look(before, 15.0, a=page(11))
    assert after.counts is not None
    assert after.counts.requests == 1
    assert list(after.last_counters) == [A]


def test_without_answers_nothing_changes() -> None:
    before = look(CounterSum(), 0.0, a=page(10))
    assert before.add(frozenset({A}), {}, 500.0) is before


def test_what_is_under_way_is_summed_and_targets_are_one_gateways() -> None:
    fields = {"in_flight": 2, "waiting": 1, "ttft_target_ms": 400, "whole_below_tokens": 256}
    total = look(CounterSum(), 0.0, a=page(1, **fields), b=page(1, **fields))
    assert total.counts is not None
    assert (total.counts.in_flight, total.counts.waiting) == (4, 2)
    assert (total.counts.ttft_target_ms, total.counts.whole_below_tokens) == (400, 256)


def test_different_bounds_are_added_where_both_are_known() -> None:
    fine = Buckets((0.1, 0.2, float("inf")), (1, 2, 4))
    one = replace(page(0), ttft=Buckets((0.1, 0.2, float("inf")), (0, 0, 0)))
    two = replace(page(0), ttft=Buckets((0.2, float("inf")), (0, 0)))
    before = look(CounterSum(), 0.0, a=one, b=two)
    coarse = Buckets((0.2, float("inf")), (5, 7))
    after = look(before, 1.0, a=replace(one, ttft=fine), b=replace(two, ttft=coarse))
    assert after.counts is not None
    assert after.counts.ttft == Buckets((0.1, 0.2, float("inf")), (1, 7, 11))


@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.integers(0, 50), st.booleans(), st.booleans()), max_size=30
    )
)
def test_the_total_is_what_was_counted_between_looks(
    steps: list[tuple[int, int, bool, bool]],
) -> None:
    counted, runs, expected = [0, 0], [1, 1], 0
    total = look(CounterSum(), 0.0, a=page(0, 100), b=page(0, 100))
    for at, (one, two, first_restarts, second_restarts) in enumerate(steps, 1):
        restarts = first_restarts, second_restarts
        for which, more in enumerate((one, two)):
            if restarts[which]:
                counted[which], runs[which] = 0, runs[which] + 1
            counted[which] += more
            expected += more
        pages = [page(counted[which], 100.0 * runs[which]) for which in (0, 1)]
        total = look(total, 15.0 * at, a=pages[0], b=pages[1])
        assert total.counts is not None
        assert total.counts.requests == expected
