"""Where simulated requests go if their prompts are cached somewhere."""

from dataclasses import replace

import numpy as np
import pytest

from cleave.policy.cache_horizon import UNKNOWN
from cleave.simulator.events import run_events_with_caches
from cleave.simulator.fleet import (
    CacheView,
    DispatchPolicy,
    SimulatedFleet,
    SimulatedPool,
)
from cleave.simulator.prefix_index import count_known_tokens, observe_oldest_use, record_prompt
from cleave.simulator.record_access import get_prompt
from cleave.simulator.records import State
from cleave.simulator.run import compile_loop, lay_out, prepare_fleet, simulate
from cleave.simulator.trace import Trace

from tests.simulator.test_prefix_caches import build_engine, build_trace

SEND, REPORT, COUNT = range(3)
LONG = "abcdefghij" * 2
KNOWN_SPEED = [(80, letter * 20) for letter in "klm"]
"""Prompts that show how fast each of three instances is."""


def build_fleet(
    count: int = 3, tokens: int = 4_000, is_split: bool = False, **more: object
) -> SimulatedFleet:
    pool = (SimulatedPool(build_engine(tokens), count),)
    more.setdefault("dispatch", DispatchPolicy.PREFIX_AWARE)
    if is_split:
        return SimulatedFleet(prefill=pool, decode=pool, **more)
    return SimulatedFleet(mixed=pool, **more)


@pytest.mark.parametrize("is_split", [False, True])
def test_a_prompt_returns_to_the_instance_that_caches_its_beginning(is_split) -> None:
    turns = [(80, LONG), (80, LONG.upper()), (83, LONG), (83, LONG.upper())]
    result = simulate(build_fleet(is_split=is_split), build_trace([*KNOWN_SPEED, *turns]))
    first, second, third, fourth = result.prefill_instance[3:]
    assert first != second
    assert (third, fourth) == (first, second)
    assert result.cached_tokens[3:].tolist() == [0, 0, 80, 80]


def test_where_dispatch_knows_nothing_of_caches_the_fleet_is_used_in_turn() -> None:
    trace = build_trace([(80, LONG)] * 3)
    result = simulate(build_fleet(cache_view=CacheView.NOTHING), trace)
    assert len(set(result.prefill_instance.tolist())) == 3


@pytest.mark.parametrize("policy", [DispatchPolicy.SHORTEST_WAIT, DispatchPolicy.LEAST_REQUESTS])
def test_other_policies_ignore_caches(policy) -> None:
    trace = build_trace([(80, LONG)] * 3)
    result = simulate(build_fleet(dispatch=policy), trace)
    assert len(set(result.prefill_instance.tolist())) == 3


def test_a_hot_prefix_spreads_once_its_queue_takes_longer_than_computing_it() -> None:
    trace = build_trace([*KNOWN_SPEED, (80, LONG), *[(200, LONG)] * 8])
    at_once = np.minimum(trace.arrival_ms, 4_000.0)
    result = simulate(build_fleet(is_split=True), replace(trace, arrival_ms=at_once))
    used = np.bincount(result.prefill_instance[4:], minlength=3)
    assert (used > 0).all()
    assert used[result.prefill_instance[3]] == used.max()


def test_a_router_forgets_blocks_after_as_many_tokens_as_the_kv_cache_holds() -> None:
    other = [(80, letter * 20) for letter in "klmnop"]
    trace = build_trace([(80, LONG), *other, (80, LONG)])
    kept = simulate(build_fleet(1, tokens=4_000), trace)
    gone = simulate(build_fleet(1, tokens=240), trace)
    assert kept.cached_tokens[-1] == 76
    assert gone.cached_tokens[-1] == 0


def apply(state: State, kind: int, r: int, ms: int) -> None:
    """At `ms` the prompt of `r` is sent to the only instance, or its blocks there are counted in
    `prompt.uncached`; or the instance reports its oldest use, at `ms`. Compiled."""
    if kind == SEND:
        state.now = float(ms)
        record_prompt(state, 0, r, 200.0)
    elif kind == REPORT:
        observe_oldest_use(state, 0, float(ms))
    else:
        get_prompt(state, r).uncached = count_known_tokens(state, 0, r)


def test_a_router_forgets_what_was_used_before_the_oldest_block_of_an_engine() -> None:
    count = 10
    trace = build_trace([(80, letter * 20) for letter in "abcdefghij"])
    arrays, state = lay_out(prepare_fleet(build_fleet(1, tokens=4_000)), trace, 0)
    compiled = compile_loop(apply, int, int, int, has_blocks=True)

    def list_known() -> list[int]:
        for r in range(count):
            compiled(state, COUNT, r, 0)
        return np.flatnonzero(arrays["prompts"]["uncached"]).tolist()

    for r in range(count):
        compiled(state, SEND, r, 10_000 * r)
    assert list_known() == list(range(count)), "half of what the KV holds"
    # Less a second, and at the prompts' own times.
    compiled(state, REPORT, 0, 45_000)
    assert list_known() == [5, 6, 7, 8, 9]
    compiled(state, REPORT, 0, 90_500)
    assert list_known() == [9]
    compiled(state, REPORT, 0, 5_000)
    assert list_known() == list(range(1, count)), "a later report counts alone"


def test_engines_report_their_oldest_use() -> None:
    trace = build_trace([(80, letter * 20) for letter in "abcdefghij"])
    for tokens, expected in (4_000, UNKNOWN), (240, 82 * 7):
        arrays, state = lay_out(prepare_fleet(build_fleet(1, tokens=tokens)), trace, 0)
        compile_loop(run_events_with_caches, has_blocks=True)(state)
        # Of ten prompts, one each second, there is room for the first blocks of the eighth. The
        # seventh was sent a second before it.
        assert arrays["caches"]["horizon"][0] == expected


@pytest.mark.parametrize("view", [CacheView.SENT, CacheView.CACHED])
def test_a_block_that_is_known_no_more_attracts_no_prompt(view) -> None:
    # The second instance is idle for longer, and the first one's cache has been overwritten.
    other = [(200, letter * 50) for letter in "klmnopqr"]
    trace = build_trace([(80, LONG), *other, (80, LONG)])
    result = simulate(build_fleet(2, tokens=240, cache_view=view), trace)
    assert result.cached_tokens[-1] == 0
    assert result.prefill_instance[-1] != result.prefill_instance[-2]


def test_only_tokens_that_are_not_cached_count_as_waiting() -> None:
    # Both prompts wait behind the same work, but one of them is cached at the first instance.
    warm = [*KNOWN_SPEED[:2], (80, LONG)]
    trace = build_trace([*warm, (80, LONG), (20, "xyxyx"), (20, "zyzyz")])
    trace = replace(trace, arrival_ms=np.minimum(trace.arrival_ms, 3_000.0))
    result = simulate(build_fleet(2, is_split=True), trace)
    home, cached, second, third = result.prefill_instance[2:]
    # The cached prompt leaves 0 tokens, so that both others may follow it or use the other one.
    assert cached == home
    assert second != cached
    assert third == cached


def test_a_short_prompt_runs_where_it_is_cached_on_a_decode_instance() -> None:
    fleet = build_fleet(2, is_split=True, short_prompt_tokens=8)
    trace = build_trace([(80, LONG), (200, "x" * 50), (200, "z" * 50), (83, LONG)], gap_ms=0.0)
    trace = replace(trace, arrival_ms=np.array([0.0, 1_000.0, 1_000.0, 1_000.0]))
    result = simulate(fleet, trace)
    assert result.prefill_instance[-1] == result.decode_instance[0] == result.decode_instance[-1]
    assert result.cached_tokens[-1] == 80


def test_equal_prompts_of_a_trace_without_blocks_are_not_found() -> None:
    tokens = np.full(3, 80)
    result = simulate(build_fleet(), Trace(1_000.0 * np.arange(3), tokens, tokens))
    assert not result.cached_tokens.any()
