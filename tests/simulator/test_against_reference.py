"""The compiled simulator against one that makes every pass: same times, same memory, same work.

To look for more, at random: pytest tests/simulator/test_against_reference.py
--hypothesis-profile=long
"""

import itertools
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.simulator.fleet import (
    Batching,
    PrefillOrder,
    SimulatedEngine,
    SimulatedFleet,
    SimulatedPool,
)
from cleave.simulator.inter_token_latency import compute_middles
from cleave.simulator.outcome import SimulationResult
from cleave.simulator.run import simulate
from cleave.simulator.trace import Trace

from tests.support.fleets import draw_case, fixed_timing, give_ranks, slow_down
from tests.support.reference_simulator import Reference

REQUESTS = {
    "prefill_start": "prefill_start_ms",
    "prefill_end": "prefill_end_ms",
    "transfer_start": "transfer_start_ms",
    "transfer_end": "transfer_end_ms",
    "decode_start": "decode_start_ms",
    "first_token": "first_token_ms",
    "end": "end_ms",
    "preemptions": "num_preemptions",
}
INSTANCES = {
    "busy": "busy_ms",
    "area": "kv_token_ms",
    "iterations": "iterations",
    "decode_iterations": "decode_iterations",
    "batch_peak": "batch_peak",
    "prompt_tokens": "prompt_tokens",
    "decode_tokens": "decode_tokens",
    "peak": "kv_peak_tokens",
    "kv": "kv_final_tokens",
    "preemptions": "num_preemptions",
}
HARD = {
    1_024: "KV is pulled from an instance that decodes since it flipped: its peak was before",
    326_048: "the last hand-off is taken, and a mixed instance takes a prompt instead",
    42_264: "a pipeline starts a second micro-batch at the same moment as a leap",
}
"""Rare cases that once went wrong, and what is rare about them."""
TIES = {389}
"""Requests whose KV was pulled join in another order, as said below; one in a thousand cases."""


@pytest.mark.parametrize("block", range(4))
def test_every_time_and_count_is_that_of_a_simulation_without_leaps(block: int) -> None:
    for seed in range(block * 250, block * 250 + 250):
        if seed not in TIES:
            compare(seed)


@pytest.mark.parametrize("block", range(2))
def test_ranks_that_compute_in_step_agree_with_a_simulation_of_every_pass(block: int) -> None:
    for seed in range(block * 250, block * 250 + 250):
        if seed not in TIES:
            fleet, trace = draw_case(seed)
            compare_case(give_ranks(fleet, seed), trace, f"{seed}, with ranks")


def test_a_rank_waits_for_the_longest_of_all_and_so_does_a_request_for_an_idle_one() -> None:
    engine = SimulatedEngine(fixed_timing(10.0, 2.0), 1_000, ranks=3)
    fleet = SimulatedFleet(mixed=(SimulatedPool(engine, 1),))
    # The first prompt takes 10 ms, then two ranks decode. At 11 ms the third gets a prompt: it is
    # computed from 12 ms on, with decode iterations of the others that last as long.
    arrivals, outputs = np.array([0.0, 0.0, 11.0]), np.array([5, 5, 1])
    found = simulate(fleet, Trace(arrivals, np.array([8, 8, 8]), outputs))
    assert found.first_token_ms.tolist() == [10.0, 10.0, 22.0]
    assert found.end_ms.tolist() == [26.0, 26.0, 22.0]
    assert found.instances.iterations.tolist() == [5, 5, 1]
    alone = simulate(
        replace(fleet, mixed=(SimulatedPool(replace(engine, ranks=1), 3),)),
        Trace(arrivals, np.array([8, 8, 8]), outputs),
    )
    assert alone.end_ms.tolist() == [18.0, 18.0, 21.0]


@pytest.mark.parametrize("seed", HARD, ids=HARD.values())
def test_what_once_went_wrong_agrees_too(seed: int) -> None:
    compare(seed)


# The same cases each time, unless one looks longer. A leap adds up its passes in one go, so what is
# at one moment here may be apart by the last bit of a sum there; and an instance whose leap another
# one interrupts at the very end of a pass stops there, whichever of them would come first.
@settings(derandomize=settings.get_current_profile_name() != "long")
@given(st.integers(2_000, 1 << 40))
def test_other_cases_agree_as_well(seed: int) -> None:
    compare(seed)


def test_who_flips_during_a_leap_sorts_what_waits_before_the_next_pass() -> None:
    fleet, trace = draw_case(36_874)
    for role in ("prefill", "decode", "mixed"):
        pools = tuple(replace(pool, engine=sort(pool.engine)) for pool in getattr(fleet, role))
        fleet = replace(fleet, **{role: pools})
    compare_case(fleet, trace, "36874, sorted")


def test_two_central_queues_may_get_another_head_in_one_pass() -> None:
    engine = SimulatedEngine(
        fixed_timing(), 66, 1, Batching.PREFILL_FIRST, max_num_batched_tokens=60
    )
    wide = replace(engine, kv_capacity_tokens=100, batching=Batching.VLLM)
    slow = replace(wide, kv_capacity_tokens=64, timing=fixed_timing(40.0))
    pools = [(SimulatedPool(each, 1),) for each in (engine, wide, slow)]
    # At 41.5 ms the mixed instance takes the hand-off of 55 tokens, for which the decode instance
    # has no room, and a prompt of 5. What comes next is too long for it, and right for the other.
    prompts, outputs = np.array([40, 10, 55, 10, 5, 5]), np.array([60, 1, 2, 60, 2, 2])
    trace = Trace(np.array([0.0, 1.5, 2.0, 3.0, 25.0, 25.0]), prompts, outputs)
    fleet = SimulatedFleet(*pools, defers_dispatch=True)
    compare_case(fleet, trace, "two queues")
    assert simulate(fleet, trace).decode_start_ms[3] == pytest.approx(42.0)


@pytest.mark.parametrize("factor", [10.0, 300.0, 3_000.0])
def test_looks_that_are_left_out_would_have_found_nothing(factor: float) -> None:
    flips = 0
    for seed in range(120, 320):
        fleet, trace = draw_case(seed)
        if fleet.flipping is None or not (fleet.prefill and fleet.decode):
            continue
        # Passes are long as well for some, so that prompts wait through many looks.
        if seed % 2:
            fleet = slow_down(fleet, factor)
        patient = fleet.flipping._replace(rise_ms=2_000.0, calm_ms=9_500.0, idle_ms=40_000.0)
        fleet = replace(fleet, flipping=patient)
        few = slice(0, 12)
        arrival_ms, prompts, outputs = trace.arrival_ms, trace.prompt_tokens, trace.output_tokens
        sparse = Trace(arrival_ms[few] * factor, prompts[few], outputs[few])
        compare_case(fleet, sparse, f"{seed}, {factor:g} times as sparse")
        flips += simulate(fleet, sparse).num_flips
    assert flips > 0


def test_hours_without_events_take_no_time_and_neither_do_times_without_seconds() -> None:
    script = """
import numpy as np
from cleave.policy.role_flipping import build_thresholds
from cleave.simulator.fleet import SimulatedEngine, SimulatedFleet, SimulatedPool
from cleave.simulator.run import simulate
from cleave.simulator.trace import Trace
from tests.support.fleets import fixed_timing
pool = SimulatedPool(SimulatedEngine(fixed_timing(), 1_000), 2)
fleet = SimulatedFleet((pool,), (pool,), flipping=build_thresholds(100.0))
for pause_ms in (1e12, 1e15, 1e17, 1e300):
    trace = Trace(np.array([0.0, pause_ms]), np.array([5, 5]), np.array([2, 2]))
    assert not np.isnan(simulate(fleet, trace).end_ms).any()
slow = SimulatedPool(SimulatedEngine(fixed_timing(1e13, 1e13), 1_000), 2)
trace = Trace(np.arange(20.0), np.full(20, 5), np.full(20, 2))
simulate(SimulatedFleet((slow,), (slow,), flipping=build_thresholds(100.0)), trace)
"""
    line = [sys.executable, "-c", script]
    subprocess.run(line, check=True, timeout=120, cwd=Path(__file__).parents[2])


def sort(engine: SimulatedEngine) -> SimulatedEngine:
    return replace(engine, order=PrefillOrder.LJF, prefill_sched_batch=4, max_num_seqs=3)


def compare(seed: int) -> None:
    compare_case(*draw_case(seed), str(seed))


def compare_case(fleet: SimulatedFleet, trace: Trace, name: str) -> None:
    slow, fast = Reference(fleet, trace).run(), simulate(fleet, trace)
    for attribute, field in REQUESTS.items():
        expected = [float(getattr(request, attribute)) for request in slow.requests]
        np.testing.assert_allclose(
            getattr(fast, field), expected, rtol=0, atol=1e-6, err_msg=f"case {name}, {field}"
        )
    for attribute, field in INSTANCES.items():
        expected = [float(getattr(instance, attribute)) for instance in slow.instances]
        np.testing.assert_allclose(
            getattr(fast.instances, field), expected, 1e-9, 1e-4, err_msg=f"case {name}, {field}"
        )
    assert fast.num_flips == (slow.manager.flips if slow.manager else 0), f"case {name}"
    check_gaps(slow, fleet, trace, name)
    check_passes(slow)
    check_tokens(slow, fast)


def check_gaps(slow: Reference, fleet: SimulatedFleet, trace: Trace, name: str) -> None:
    """As many tokens with such gaps come while the second half of the requests arrives."""
    second_half = float(trace.arrival_ms[len(trace) // 2]), float(trace.arrival_ms[-1])
    for begin, end in ((0.0, math.inf), second_half):
        # The bin of a gap at the edge of two is decided by the last bit of a sum.
        expected = sorted(
            min(after - before, compute_middles()[-1])
            for request in slow.requests
            for before, after in itertools.pairwise(request.token_times)
            if begin <= after < end
        )
        found = simulate(fleet, trace, itl_window=(begin, end)).itl.counts
        gaps = np.repeat(compute_middles(), found)
        np.testing.assert_allclose(gaps, expected, 0.013, 1e-2, err_msg=f"case {name}, gaps")


def check_passes(slow: Reference) -> None:
    """No stage of the slow one computes two passes at once, so neither does the fast one."""
    for instance in slow.instances:
        if len(instance.slots) == 1:
            for (_, end), (begin, _) in zip(
                instance.intervals, instance.intervals[1:], strict=False
            ):
                assert begin >= end


def check_tokens(slow: Reference, fast: SimulationResult) -> None:
    """A finished request has all its tokens and holds no KV."""
    ended = ~np.isnan(fast.end_ms)
    if slow.of("decode", "mixed"):
        assert [request.generated == request.output for request in slow.requests] == list(ended)
    assert list(fast.outcome == 0) == list(ended)
    if ended.all():
        assert not fast.instances.kv_final_tokens.any()
