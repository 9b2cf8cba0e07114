"""Predicts a plan: goodput with its interval, and latencies at the requested rate.

Called by the search for the plans that it lists. Trials are long here and repeated with other
seeds; those of the search itself are only good enough to compare.
"""

import math
from dataclasses import dataclass

import numpy as np

from cleave.api.planning import Objective
from cleave.perf.estimate import Confidence, LatencySource
from cleave.planner.plan import Percentiles, Plan, Prediction
from cleave.planner.problem import Problem
from cleave.planner.result import short_prompts
from cleave.planner.search import goodput
from cleave.planner.search.candidate_placement import (
    CandidatePlacement,
    build_cell_fleet,
    compute_ahead_from_tokens,
    to_planned_pools,
)
from cleave.planner.search.goodput import Goodput
from cleave.planner.search.trials import Targets, Trials, TrialSpan
from cleave.simulator.outcome import SimulationResult, Times
from cleave.simulator.trace import Trace

_SEEDS = 5
_FEW_SEEDS = 3
_LONG_TRIAL_REQUESTS = 50_000
"""Trials of this many requests vary little between seeds, so fewer seeds are enough."""
_BASIS_ORDER = list(LatencySource)


@dataclass(frozen=True, slots=True)
class PredictedPlan:
    """A plan with the results of its simulation."""

    placement: CandidatePlacement
    plan: Plan
    is_monotone: bool
    """False: attainment did not fall with the rate everywhere."""
    outcome: SimulationResult
    """Outcome of one cell at its share of the requested rate."""
    trace: Trace
    """The requests of `outcome`."""
    span: TrialSpan
    """The counted part of `outcome`."""

    def holds(self, attainment: float) -> bool:
        """Whether the attainment target is met at the requested rate."""
        return self.plan.prediction.attainment >= attainment


def predict(
    problem: Problem,
    trials: Trials,
    placement: CandidatePlacement,
    targets: Targets,
    algorithm: str,
) -> PredictedPlan:
    """Simulate `placement` at the requested rate and around its goodput."""
    fleet, rate = build_cell_fleet(problem, placement), problem.rate / placement.copies
    span = trials.compute_span(rate, targets)
    outcome = trials.simulate(fleet, rate, span)
    seeds = _SEEDS if span.counted < _LONG_TRIAL_REQUESTS else _FEW_SEEDS
    goodput_found = goodput.confirm_goodput(trials, fleet, targets, Goodput(rate, 0.0), seeds)
    served = goodput_found.rate * placement.copies
    trace = trials.build_trace(span.total, rate)
    plan = Plan(
        pools=to_planned_pools(placement),
        prediction=_build_prediction(placement, outcome, span, targets, goodput_found),
        algorithm=algorithm,
        score=compute_score(placement, served, problem.rate, problem.planning.objective),
        is_gpu_chosen=len({supply.gpu for supply in problem.supplies}) > 1,
        whole_below_tokens=short_prompts.compute_whole_below_tokens(
            problem, placement, outcome, trace
        ),
        ahead_from_tokens=compute_ahead_from_tokens(problem, placement),
    )
    return PredictedPlan(placement, plan, goodput_found.is_monotone, outcome, trace, span)


def compute_score(
    placement: CandidatePlacement, served: float, rate: float, objective: Objective
) -> float:
    """Served requests per second, at most the requested rate, per GPU, price or watt.

    Goodput above the requested rate has no value yet; a plan should serve that rate with few
    resources.
    """
    return min(served, rate) / placement.get_resources(objective)


def select_worst_trust(trusts: list[Confidence]) -> Confidence:
    """The least reliable one: it limits the prediction of a plan that depends on all."""
    return max(
        trusts,
        key=lambda each: (
            _BASIS_ORDER.index(each.kind),
            math.inf if each.error is None else each.error,
        ),
    )


def compute_percentiles(values: Times) -> Percentiles:
    """P50, P90 and P99; nan (never reached) counts as infinite."""
    ended = np.where(np.isnan(values), np.inf, values)
    p50, p90, p99 = (float(np.quantile(ended, q, method="higher")) for q in (0.5, 0.9, 0.99))
    return Percentiles(p50, p90, p99)


def _build_prediction(
    placement: CandidatePlacement,
    outcome: SimulationResult,
    span: TrialSpan,
    targets: Targets,
    goodput_found: Goodput,
) -> Prediction:
    ttft_ms, tpot_ms = outcome.ttft_ms[span.window], outcome.tpot_ms[span.window]
    is_met = (ttft_ms <= targets.ttft_ms) & (tpot_ms <= targets.tpot_ms)
    low, high = goodput_found.interval or (goodput_found.rate, goodput_found.rate)
    return Prediction(
        goodput=goodput_found.rate * placement.copies,
        goodput_interval=(low * placement.copies, high * placement.copies),
        attainment=float(np.mean(is_met)),
        ttft_ms=compute_percentiles(ttft_ms),
        tpot_ms=compute_percentiles(tpot_ms),
        cost_per_hour=placement.cost_per_hour,
        power_watts=placement.power_watts,
        trust=select_worst_trust(
            [group.instance.candidate.estimate.confidence for group in placement.groups]
        ),
    )
