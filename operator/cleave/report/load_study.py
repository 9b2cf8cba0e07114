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
from cleave.planner.plan import Answer, Plan
from cleave.report.layout import NodeShape
from cleave.simulator.latency_breakdown import Stage, stage_shares
from cleave.simulator.outcome import Outcome, Times

SCALES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0)
"""Factors on the requested TTFT and TPOT targets."""
LOADS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0)
"""Simulated rates as factors on a plan's goodput."""
_MOST_PLANS = 8
_CDF_POINTS = 201


class Bench(Protocol):
    """Simulates a plan of one deployment under its workload."""

    def serve(self, plan: Plan, rate: float) -> Outcome:
        """Simulate requests of the workload at `rate` req/s; the same ones for every plan."""


@dataclass(frozen=True, slots=True)
class Subject:
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
class Sweep:
    """One plan simulated at rising rates; all sequences are indexed by rate."""

    plan: Plan
    rates: tuple[float, ...]
    attainment: tuple[float, ...]
    ttft_p90_ms: tuple[float, ...]
    tpot_p90_ms: tuple[float, ...]
    stages: tuple[dict[Stage, float], ...]
    attainment_by_scale: NDArray[np.float64]
    """Array of shape (rates, TTFT scales, TPOT scales)."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of one plan at the requested rate."""

    plan: Plan
    ttft_ms: tuple[float, ...]
    """Quantiles 0, 0.005, ... 1; unfinished requests count as infinite."""
    tpot_ms: tuple[float, ...]
    stages: dict[Stage, float]


@dataclass(frozen=True, slots=True)
class Study:
    """All data of the page."""

    subject: Subject
    answer: Answer
    sweeps: tuple[Sweep, ...]
    """The selected plan first, then the alternatives in their order, then the neighbours."""
    latencies: tuple[Latencies, ...]
    """Those of the selected plan (or the best one) and of the best of the other kind."""
    neighbours: tuple[Plan, ...] = ()
    """Plans with a few instances more or less, for comparison."""


def study(
    subject: Subject, result: Answer, bench: Bench, neighbours: tuple[Plan, ...] = ()
) -> Study:
    """Simulate the plans of `result` and their neighbours as far as the page needs it."""
    listed = shown_plans(result)
    plans = (*listed, *neighbours)
    return Study(
        subject=subject,
        answer=result,
        neighbours=neighbours,
        sweeps=tuple(_sweep(subject, plan, bench) for plan in plans),
        latencies=tuple(_latencies(subject, plan, bench) for plan in rivals(listed)),
    )


def shown_plans(result: Answer) -> tuple[Plan, ...]:
    """The plans that the page describes; the best of each kind is always among them."""
    every = ((result.selected,) if result.selected else ()) + result.alternatives
    best = every[:_MOST_PLANS]
    return best + tuple(plan for plan in rivals(every) if plan not in best)


def rivals(plans: Sequence[Plan]) -> tuple[Plan, ...]:
    """The first plan, and the first of the other kind (disaggregated or not)."""
    others = (plan for plan in plans if plan.is_disaggregated != plans[0].is_disaggregated)
    other = next(others, None)
    return (*plans[:1], *((other,) if other else ()))


def goodput(rates: Sequence[float], attainment: Sequence[float], target: float) -> float:
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


def _sweep(subject: Subject, plan: Plan, bench: Bench) -> Sweep:
    base = plan.prediction.goodput or subject.rate
    rates = tuple(load * base for load in LOADS)
    outcomes = [bench.serve(plan, rate) for rate in rates]
    slo = subject.slo
    return Sweep(
        plan=plan,
        rates=rates,
        attainment=tuple(each.attainment(slo.ttft_ms, slo.tpot_ms) for each in outcomes),
        ttft_p90_ms=tuple(_quantile(each.ttft_ms, 0.9) for each in outcomes),
        tpot_p90_ms=tuple(_quantile(each.tpot_ms, 0.9) for each in outcomes),
        stages=tuple(stage_shares(each) for each in outcomes),
        attainment_by_scale=np.array([_by_scale(each, slo) for each in outcomes]),
    )


def _by_scale(outcome: Outcome, slo: Slo) -> NDArray[np.float64]:
    scales = np.array(SCALES)
    in_time = outcome.ttft_ms[:, None] <= slo.ttft_ms * scales
    fluent = outcome.tpot_ms[:, None] <= slo.tpot_ms * scales
    both: NDArray[np.float64] = in_time.T.astype(float) @ fluent.astype(float) / len(in_time)
    return both


def _latencies(subject: Subject, plan: Plan, bench: Bench) -> Latencies:
    outcome = bench.serve(plan, subject.rate)
    levels = np.linspace(0, 1, _CDF_POINTS)
    return Latencies(
        plan=plan,
        ttft_ms=tuple(_quantile(outcome.ttft_ms, level) for level in levels),
        tpot_ms=tuple(_quantile(outcome.tpot_ms, level) for level in levels),
        stages=stage_shares(outcome),
    )


def _quantile(values: Times, level: float) -> float:
    """The value at or above the share `level` of requests; nan counts as infinite."""
    latencies = np.where(np.isnan(values), np.inf, values)
    return float(np.quantile(latencies, level, method="higher"))
