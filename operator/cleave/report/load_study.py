"""Simulates plans at rising rates, for the page's charts and sliders. Pure.

Called by `cleave plan --report`. What is hard: sliders over rate and SLO must respond at once in a
browser, so every plan is simulated once per rate, and each SLO is then only a count over the same
latencies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cleave.api.deployment import LLMDeployment, Slo
from cleave.planner.plan import Plan, PlanningResult
from cleave.planner.pool_simulation import PlacementSimulator
from cleave.planner.problem import Problem
from cleave.planner.result.text import format_number
from cleave.report.layout import NodeShape
from cleave.simulator.outcome import (
    LatencyStage,
    SimulationResult,
    compute_quantile,
    compute_stage_shares,
)

SCALES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0)
"""Factors on the requested TTFT and TPOT targets."""
LOADS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0)
"""Simulated rates as factors on a plan's goodput."""
_MAX_PLANS = 8
_CDF_POINTS = 201
_MIN_REQUESTS = 1000
_MAX_REQUESTS = 20_000
_DURATION_S = 120.0
"""Simulated time of one point on the page, within the limits on the number of requests."""


class PlanSimulator(Protocol):
    """Simulates a plan of one deployment under its workload."""

    def simulate_plan(self, plan: Plan, rate: float) -> SimulationResult:
        """Simulate requests of the workload at `rate` req/s; the same ones for every plan."""


@dataclass(frozen=True, slots=True)
class ReportInput:
    """The planned deployment, as the page describes it."""

    deployment: str
    model: str
    slo: Slo
    rate: float
    """Requests per second."""
    traffic: str
    """Description of the workload in one sentence."""
    nodes: tuple[NodeShape, ...]
    max_gpus: int
    """Most GPUs that a plan may use."""
    seed: int


@dataclass(frozen=True, slots=True)
class RateSweep:
    """One plan simulated at rising rates; all sequences are indexed by rate."""

    plan: Plan
    rates: tuple[float, ...]
    attainment: tuple[float, ...]
    ttft_p90_ms: tuple[float, ...]
    tpot_p90_ms: tuple[float, ...]
    stages: tuple[dict[LatencyStage, float], ...]
    attainment_by_scale: NDArray[np.float64]
    """Array of shape (rates, TTFT scales, TPOT scales)."""


@dataclass(frozen=True, slots=True)
class PlanLatencies:
    """Latencies of one plan at the requested rate."""

    plan: Plan
    ttft_ms: tuple[float, ...]
    """Quantiles 0, 0.005, ... 1; unfinished requests count as infinite."""
    tpot_ms: tuple[float, ...]
    stages: dict[LatencyStage, float]


@dataclass(frozen=True, slots=True)
class LoadStudy:
    """All data of the page."""

    report_input: ReportInput
    result: PlanningResult
    sweeps: tuple[RateSweep, ...]
    """The selected plan first, then the alternatives in their order, then the neighbours."""
    latencies: tuple[PlanLatencies, ...]
    """Those of the selected plan (or the best one) and of the best of the other kind."""
    neighbours: tuple[Plan, ...] = ()
    """Plans with a few instances more or less, for comparison."""


def build_report_input(deployment: LLMDeployment, problem: Problem) -> ReportInput:
    """Describe the deployment and the problem built from it."""
    return ReportInput(
        deployment=deployment.name,
        model=deployment.spec.model.name,
        slo=problem.slo,
        rate=problem.rate,
        traffic=_describe_traffic(deployment, problem),
        nodes=tuple(NodeShape(s.gpu, s.num_nodes, s.gpus_per_node) for s in problem.supplies),
        max_gpus=problem.max_gpus,
        seed=problem.seed,
    )


def build_simulator(problem: Problem) -> PlacementSimulator:
    """A simulator of the problem's requests, with as many requests as a point of the page needs."""
    num_requests = int(problem.rate * _DURATION_S)
    return PlacementSimulator(problem, min(max(num_requests, _MIN_REQUESTS), _MAX_REQUESTS))


def run_study(
    subject: ReportInput,
    result: PlanningResult,
    bench: PlanSimulator,
    neighbours: tuple[Plan, ...] = (),
) -> LoadStudy:
    """Simulate the plans of `result` and their neighbours as far as the page needs it."""
    plans = select_plans(result)
    return LoadStudy(
        report_input=subject,
        result=result,
        neighbours=neighbours,
        sweeps=tuple(_run_sweep(subject, each, bench) for each in (*plans, *neighbours)),
        latencies=tuple(_simulate_latencies(subject, each, bench) for each in select_rivals(plans)),
    )


def select_plans(result: PlanningResult) -> tuple[Plan, ...]:
    """The plans that the page describes; the best of each kind is always among them."""
    best = result.plans[:_MAX_PLANS]
    return best + tuple(plan for plan in select_rivals(result.plans) if plan not in best)


def select_rivals(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """The first plan, and the first of the other kind (disaggregated or not)."""
    others = (plan for plan in plans if plan.is_disaggregated != plans[0].is_disaggregated)
    return (*plans[:1], *islice(others, 1))


def interpolate_goodput(rates: Sequence[float], shares: Sequence[float], target: float) -> float:
    """Rate at which attainment first falls below `target`, interpolated linearly. 0 when the lowest
    rate misses the target, the highest rate when none does."""
    for low, (rate, share) in enumerate(zip(rates[1:], shares[1:], strict=True)):
        if shares[low] < target:
            return 0.0
        if share < target:
            part = (shares[low] - target) / (shares[low] - share)
            return rates[low] + part * (rate - rates[low])
    return rates[-1]


def _run_sweep(subject: ReportInput, plan: Plan, bench: PlanSimulator) -> RateSweep:
    base = plan.prediction.goodput or subject.rate
    rates = tuple(load * base for load in LOADS)
    outcomes = [bench.simulate_plan(plan, rate) for rate in rates]
    slo = subject.slo
    return RateSweep(
        plan=plan,
        rates=rates,
        attainment=tuple(each.compute_attainment(slo.ttft_ms, slo.tpot_ms) for each in outcomes),
        ttft_p90_ms=tuple(compute_quantile(each.ttft_ms, 0.9) for each in outcomes),
        tpot_p90_ms=tuple(compute_quantile(each.tpot_ms, 0.9) for each in outcomes),
        stages=tuple(compute_stage_shares(each) for each in outcomes),
        attainment_by_scale=np.array([_compute_attainment_by_scale(o, slo) for o in outcomes]),
    )


def _compute_attainment_by_scale(outcome: SimulationResult, slo: Slo) -> NDArray[np.float64]:
    scales = np.array(SCALES)
    in_time = outcome.ttft_ms[:, None] <= slo.ttft_ms * scales
    fluent = outcome.tpot_ms[:, None] <= slo.tpot_ms * scales
    both: NDArray[np.float64] = in_time.T.astype(float) @ fluent.astype(float) / len(in_time)
    return both


def _simulate_latencies(subject: ReportInput, plan: Plan, bench: PlanSimulator) -> PlanLatencies:
    outcome = bench.simulate_plan(plan, subject.rate)
    levels = np.linspace(0, 1, _CDF_POINTS)
    return PlanLatencies(
        plan=plan,
        ttft_ms=tuple(compute_quantile(outcome.ttft_ms, level) for level in levels),
        tpot_ms=tuple(compute_quantile(outcome.tpot_ms, level) for level in levels),
        stages=compute_stage_shares(outcome),
    )


def _describe_traffic(deployment: LLMDeployment, problem: Problem) -> str:
    demand, spec = problem.demand, deployment.spec.workload
    lengths = (
        f"prompts of {format_number(demand.mean_prompt_tokens)} and outputs of "
        f"{format_number(demand.mean_output_tokens)} tokens on average"
    )
    if spec is not None and spec.trace is not None:
        return f"{lengths}, from {spec.trace.path}"
    burstiness = spec.gap_variation if spec is not None else 1.0
    if burstiness == 1.0:
        return f"{lengths}, Poisson arrivals"
    return f"{lengths}, gaps between arrivals with a variation of {burstiness:g}"
