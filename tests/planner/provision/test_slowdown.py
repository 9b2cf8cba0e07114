from dataclasses import replace

import numpy as np
import pytest

from cleave.perf import named_profiles
from cleave.planner.plan import Percentiles
from cleave.planner.provision import slowdown
from cleave.planner.provision.slowdown import SPLITWISE_TABLE_VI, Slowdowns
from cleave.simulator.fleet import SimulatedEngine, SimulatedFleet, SimulatedPool
from cleave.simulator.run import simulate
from cleave.simulator.trace import Trace
from cleave.traffic import workload
from cleave.traffic.workload import GeneratedRequests, IndependentLengths, LogNormal

PROFILE = named_profiles.load_profile("distserve/opt-13b/tp1")
LENGTHS = IndependentLengths(
    LogNormal.from_mean_and_p90(300, 600), LogNormal.from_mean_and_p90(50, 100)
)


def serve(trace: Trace, replicas: int = 1) -> slowdown.Slowdowns:
    engine = SimulatedEngine(PROFILE.timing, PROFILE.kv_capacity_tokens)
    outcome = simulate(SimulatedFleet(mixed=(SimulatedPool(engine, replicas),)), trace)
    return slowdown.measure_slowdowns(
        outcome, slowdown.compute_unloaded_latencies(PROFILE.timing, trace)
    )


def test_a_request_alone_on_the_reference_is_not_slowed_down() -> None:
    trace = workload.Demand(0.05, GeneratedRequests(LENGTHS, 0.0)).draw(50)
    found = serve(trace)
    for latency_of in (found.ttft, found.tpot, found.e2e):
        assert (latency_of.p50, latency_of.p99) == pytest.approx((1, 1), rel=1e-6)


def test_company_slows_every_phase_down() -> None:
    found = serve(workload.Demand(6.0, GeneratedRequests(LENGTHS)).draw(500))
    for latency_of in (found.ttft, found.tpot, found.e2e):
        assert 1.05 < latency_of.p50 <= latency_of.p90 <= latency_of.p99


def test_a_reference_twice_as_slow_halves_every_slowdown() -> None:
    timing = PROFILE.timing
    slow = replace(
        timing,
        prompt_ms=tuple(2 * ms for ms in timing.prompt_ms),
        prompt_square_ms=2 * timing.prompt_square_ms,
        decode_ms=tuple(2 * ms for ms in timing.decode_ms),
        decode_context_ms=tuple(2 * ms for ms in timing.decode_context_ms),
    )
    trace = workload.Demand(4.0, GeneratedRequests(LENGTHS)).draw(200)
    outcome = simulate(
        SimulatedFleet(mixed=(SimulatedPool(SimulatedEngine(timing, 60_000), 1),)), trace
    )
    one = slowdown.measure_slowdowns(outcome, slowdown.compute_unloaded_latencies(timing, trace))
    two = slowdown.measure_slowdowns(outcome, slowdown.compute_unloaded_latencies(slow, trace))
    assert (two.ttft.p90, two.tpot.p90, two.e2e.p90) == pytest.approx(
        (one.ttft.p90 / 2, one.tpot.p90 / 2, one.e2e.p90 / 2)
    )


def test_a_request_that_never_ends_is_infinitely_slow() -> None:
    trace = Trace(np.zeros(3), np.array([100, 100, 90_000]), np.array([5, 5, 5]))
    found = serve(trace)
    assert found.e2e.p99 == np.inf
    assert found.e2e.p50 < np.inf
    assert not found.is_within(SPLITWISE_TABLE_VI)


def test_requests_of_one_token_have_no_gaps_to_judge() -> None:
    trace = Trace(np.array([0.0, 5000.0]), np.array([100, 100]), np.array([1, 1]))
    assert serve(trace).tpot == Percentiles(0, 0, 0)


def test_the_first_requests_may_be_left_out() -> None:
    trace = Trace(np.array([0.0, 0.0, 9000.0]), np.array([9000, 100, 100]), np.array([2, 2, 2]))
    engine = SimulatedEngine(PROFILE.timing, PROFILE.kv_capacity_tokens)
    outcome = simulate(SimulatedFleet(mixed=(SimulatedPool(engine, 1),)), trace)
    alone = slowdown.compute_unloaded_latencies(PROFILE.timing, trace)
    assert slowdown.measure_slowdowns(outcome, alone).ttft.p99 > 2
    assert slowdown.measure_slowdowns(outcome, alone, slice(2, 3)).ttft.p99 == pytest.approx(1)


@pytest.mark.parametrize("metric", ["ttft", "tpot", "e2e"])
@pytest.mark.parametrize("percentile", ["p50", "p90", "p99"])
def test_each_of_the_nine_targets_counts(metric: str, percentile: str) -> None:
    assert SPLITWISE_TABLE_VI.is_within(SPLITWISE_TABLE_VI)
    limit: Percentiles = getattr(SPLITWISE_TABLE_VI, metric)
    above = replace(limit, **{percentile: getattr(limit, percentile) + 0.01})
    missed: Slowdowns = replace(SPLITWISE_TABLE_VI, **{metric: above})
    assert not missed.is_within(SPLITWISE_TABLE_VI)
