"""Answers that the papers print or that queueing theory gives."""

from dataclasses import replace

import numpy as np
import pytest

from cleave.api.deployment import Slo
from cleave.perf.named_profiles import to_timing
from cleave.perf.published.distserve import FITS, KV_CAPACITY_TOKENS, AffineFit, PublishedFit
from cleave.perf.timing import EngineTiming
from cleave.planner import plan_search
from cleave.planner.plan import PlanVerdict
from cleave.planner.result import md1
from cleave.planner.search import goodput, low_affinity
from cleave.planner.search.candidates import list_candidates
from cleave.planner.search.trials import (
    CONFIRMATION_PRECISION,
    RANKING_PRECISION,
    Precision,
    Targets,
    Trials,
)
from cleave.simulator.fleet import Batching, SimulatedEngine, SimulatedFleet, SimulatedPool
from cleave.simulator.run import simulate
from cleave.simulator.trace import Trace
from cleave.traffic import published
from cleave.traffic.workload import build_fixed

from tests.support import known_problems

BLOG = build_fixed(512, 64, 1.0)
BLOG_TARGETS = Targets(400.0, 40.0, 0.9)
CHAT_TARGETS = Targets(200.0, 100.0, 0.9)
PREFILL_MS = 100.0


def blog_engine() -> SimulatedEngine:
    """vLLM on one A100 with what DistServe's simulator adds to each pass: 2 ms and 0.0001 ms per
    token of context, and to prompts 1 ms."""
    fit = FITS["vllm/opt-13b/tp1"]

    def slowed(line: AffineFit, by_ms: float) -> AffineFit:
        return AffineFit(line.fixed_ms + by_ms, line.per_token_ms + 1e-4, line.regressor_ms)

    return SimulatedEngine(
        to_timing(
            PublishedFit(
                slowed(fit.prefill, 3.0), slowed(fit.decode_small, 2.0), slowed(fit.decode_large, 2)
            )
        ),
        kv_capacity_tokens=KV_CAPACITY_TOKENS["opt-13b"][1, 1],
        batching=Batching.PREFILL_FIRST,
    )


COLOCATED = SimulatedFleet(mixed=(SimulatedPool(blog_engine(), 1),))
DECODE = SimulatedFleet(decode=(SimulatedPool(blog_engine(), 1),))
PREFILL = SimulatedFleet(prefill=(SimulatedPool(blog_engine(), 1),))


def rate(
    fleet: SimulatedFleet, targets: Targets, precision: Precision = CONFIRMATION_PRECISION
) -> float:
    """Goodput under the blog's requests, mean of five samples."""
    trials = Trials(BLOG, precision=precision)
    first = goodput.find_goodput(trials, fleet, targets)
    return goodput.confirm_goodput(trials, fleet, targets, first).rate


# ---- DistServe's blog: 13B on one A100, 512 tokens in, 64 out, TTFT 0.4 s, TPOT 40 ms, P90 ----


def test_the_blogs_colocated_instance_serves_1_6_requests_a_second_in_simdistserves_trace() -> None:
    def holds(requests_per_second: float) -> bool:
        # Its 300 requests of seed 0; it counts one decode pass more.
        gaps = np.random.RandomState(0).gamma(1, 1000 / requests_per_second, 299)
        arrivals = np.append(0.0, np.cumsum(gaps))
        trace = Trace(arrivals, np.full(300, 512), np.full(300, 65))
        return simulate(COLOCATED, trace).compute_attainment(400.0, 40.0) >= 0.9

    assert holds(1.6 * 0.95)
    assert not holds(1.6 * 1.05)


def test_more_requests_put_the_blogs_colocated_instance_at_1_8() -> None:
    assert rate(COLOCATED, BLOG_TARGETS) == pytest.approx(1.8, rel=0.03)


def test_the_blogs_decode_instance_serves_10_requests_a_second() -> None:
    assert rate(DECODE, BLOG_TARGETS.decode_only) == pytest.approx(10, rel=0.1)


def test_the_blogs_prefill_instance_does_not_reproduce() -> None:
    # The blog says 5.6. With the coefficients published later a prompt takes 99 ms, and a queue of
    # such prompts holds 0.4 s for nine in ten at more than 7 a second.
    assert rate(PREFILL, BLOG_TARGETS.prefill_only) == pytest.approx(7.5, rel=0.05)


# ---- Queueing theory: DistServe, Eq. 1 to 3 ----


def waits(timing: EngineTiming, requests_per_second: float) -> float:
    """Mean TTFT of prompts that are all alike, one in a pass, in ms."""
    engine = SimulatedEngine(
        timing,
        kv_capacity_tokens=1 << 20,
        batching=Batching.PREFILL_FIRST,
        max_num_batched_tokens=512,
        max_num_seqs=1 << 16,
    )
    trace = build_fixed(512, 1, requests_per_second).draw(400_000, seed=1)
    fleet = SimulatedFleet(prefill=(SimulatedPool(engine, 1),))
    return float(simulate(fleet, trace).ttft_ms.mean())


def timing(prefill_ms: float, stages: int = 1) -> EngineTiming:
    return EngineTiming(
        prompt_step=512.0,
        prompt_ms=(0.0, prefill_ms),
        prompt_square_ms=0.0,
        decode_ms=(1.0, 1.0),
        decode_context_ms=(0.0,),
        stages=stages,
    )


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_a_prefill_instance_waits_as_m_d_1_does(load: float) -> None:
    arrivals = load * 1000 / PREFILL_MS
    expected = md1.compute_mean_ttft_ms(arrivals, PREFILL_MS)
    assert waits(timing(PREFILL_MS), arrivals) == pytest.approx(expected, rel=0.01)


def test_two_stages_wait_as_equation_2_says() -> None:
    expected = md1.compute_mean_ttft_ms(14.0, PREFILL_MS, 2)
    assert waits(timing(PREFILL_MS, stages=2), 14.0) == pytest.approx(expected, rel=0.01)


def test_two_tensor_parallel_gpus_wait_as_equation_3_says() -> None:
    speedup = 1.6
    expected = md1.compute_mean_ttft_ms(11.0, PREFILL_MS / speedup)
    assert waits(timing(PREFILL_MS / speedup), 11.0) == pytest.approx(expected, rel=0.01)


# ---- DistServe's evaluation ----


def test_algorithm_2_finds_table_5s_parallelism_for_13b_on_sharegpt() -> None:
    problem = known_problems.problem(published.get_workload("sharegpt").build_demand())
    search = known_problems.search(problem, CHAT_TARGETS)
    found = low_affinity.optimize(search, list_candidates(problem))
    assert found is not None
    sizes = [group.instance.candidate.parallelism for group in found.placement.groups]
    assert [(size.tensor, size.pipeline) for size in sizes] == [(2, 1), (1, 1)]


@pytest.mark.parametrize(
    ("fleet", "targets"),
    [
        (COLOCATED, BLOG_TARGETS),
        (DECODE, BLOG_TARGETS.decode_only),
        (PREFILL, BLOG_TARGETS.prefill_only),
    ],
    ids=["colocated", "decode", "prefill"],
)
def test_a_thousand_requests_say_what_ten_thousand_say(
    fleet: SimulatedFleet, targets: Targets
) -> None:
    few, many = (
        rate(fleet, targets, precision) for precision in (RANKING_PRECISION, CONFIRMATION_PRECISION)
    )
    assert few == pytest.approx(many, rel=0.05)


def test_a_short_trace_passes_a_rate_far_above_the_goodput() -> None:
    # Where decoding is short of memory, 300 requests end before their queue has grown.
    demand = published.get_workload("sharegpt").build_demand()
    engine = replace(blog_engine(), timing=to_timing(FITS["distserve/opt-13b/tp1"]))
    fleet, targets = SimulatedFleet(decode=(SimulatedPool(engine, 1),)), CHAT_TARGETS.decode_only
    honest = goodput.find_goodput(
        Trials(demand, precision=CONFIRMATION_PRECISION), fleet, targets
    ).rate
    short = simulate(fleet, demand.draw(300, 1.5 * honest))
    assert short.compute_attainment(targets.ttft_ms, targets.tpot_ms) >= targets.attainment


def test_targets_below_the_shortest_pass_are_refused_with_the_nearest_that_hold() -> None:
    problem = known_problems.problem(BLOG, Slo(ttft_ms=400, tpot_ms=5))
    answer = plan_search.plan(problem)
    assert answer.verdict is PlanVerdict.INFEASIBLE
    assert answer.selected is None
    assert answer.nearest_slo is not None
    # A decode pass takes 11 ms with the most GPUs.
    assert answer.nearest_slo.tpot_ms > 10
