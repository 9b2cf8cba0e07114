"""Simulates plans at rising rates, for the page's charts and sliders. Pure.

Called by `cleave plan --report`. What is hard: sliders over rate and SLO must respond at once in a
browser, so every plan is simulated once per rate, and each SLO is then only a count over the same
latencies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cleave.api.deployment import Slo
from cleave.planner.plan import Plan, PlanningResult
from cleave.report.layout import NodeShape
from cleave.simulator.outcome import LatencyStage, SimulationResult, Times, compute_stage_shares

SCALES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0)
"""Factors on the requested TTFT and TPOT targets."""
LOADS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0)
"""Simulated rates as factors on a plan's goodput."""
_MAX_PLANS = 8
_CDF_POINTS = 201


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


def run_study(
    subject: ReportInput,
    result: PlanningResult,
    bench: PlanSimulator,
    neighbours: tuple[Plan, ...] = (),
) -> LoadStudy:
    """Simulate the plans of `result` and their neighbours as far as the page needs it."""
    listed = select_plans(result)
    plans = (*listed, *neighbours)
    return LoadStudy(
        report_input=subject,
        result=result,
        neighbours=neighbours,
        sweeps=tuple(_run_sweep(subject, plan, bench) for plan in plans),
        latencies=tuple(
            _simulate_latencies(subject, plan, bench) for plan in select_rivals(listed)
        ),
    )


def select_plans(result: PlanningResult) -> tuple[Plan, ...]:
    """The plans that the page describes; the best of each kind is always among them."""
    every = ((result.selected,) if result.selected else ()) + result.alternatives
    best = every[:_MAX_PLANS]
    return best + tuple(plan for plan in select_rivals(every) if plan not in best)


def select_rivals(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """The first plan, and the first of the other kind (disaggregated or not)."""
    others = (plan for plan in plans if plan.is_disaggregated != plans[0].is_disaggregated)
    other = next(others, None)
    return (*plans[:1], *((other,) if other else ()))


def interpolate_goodput(
    rates: Sequence[float], attainment: Sequence[float], target: float
) -> float:
    """Rate at which attainment first falls below `target`, interpolated linearly.

    0 when the lowest rate misses the target, the highest rate when none does.
    """
    for low, (rate, share) in enumerate(zip(rates[1:], attainment[1:], strict=True)):
        if attainment[low] < target:
            return 0.0
        if share < target:
            part = (attainment[low] - target) / (attainment[low] - share)
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
        ttft_p90_ms=tuple(_compute_quantile(each.ttft_ms, 0.9) for each in outcomes),
        tpot_p90_ms=tuple(_compute_quantile(each.tpot_ms, 0.9) for each in outcomes),
        stages=tuple(compute_stage_shares(each) for each in outcomes),
        attainment_by_scale=np.array(
            [_compute_attainment_by_scale(each, slo) for each in outcomes]
        ),
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
        ttft_ms=tuple(_compute_quantile(outcome.ttft_ms, level) for level in levels),
        tpot_ms=tuple(_compute_quantile(outcome.tpot_ms, level) for level in levels),
        stages=compute_stage_shares(outcome),
    )


def _compute_quantile(values: Times, level: float) -> float:
    """The value at or above the share `level` of requests; nan counts as infinite."""
    latencies = np.where(np.isnan(values), np.inf, values)
    return float(np.quantile(latencies, level, method="higher"))
