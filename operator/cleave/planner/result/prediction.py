"""Predicts a plan: goodput with its interval, and latencies at the requested rate.

Called by the search for the plans that it lists. Trials are long here and repeated with other
seeds; those of the search itself are only good enough to compare.
"""

import math
from dataclasses import dataclass

import numpy as np

from cleave.api.planning import Objective
from cleave.perf.confidence import Basis, Trust
from cleave.planner.plan import Percentiles, Plan, Prediction
from cleave.planner.problem import Problem
from cleave.planner.result import short_prompts
from cleave.planner.search import goodput
from cleave.planner.search.candidate_placement import (
    Draft,
    ahead_from_tokens,
    cell_fleet,
    planned_pools,
)
from cleave.planner.search.goodput import Goodput
from cleave.planner.search.trials import Span, Targets, Trials
from cleave.simulator.outcome import Outcome, Times
from cleave.simulator.trace import Trace

_SEEDS = 5
_FEW_SEEDS = 3
_LONG = 50_000
"""Trials of this many requests vary little between seeds, so fewer seeds are enough."""
_WORST = list(Basis)


@dataclass(frozen=True, slots=True)
class Finalist:
    """A plan with the results of its simulation."""

    draft: Draft
    plan: Plan
    is_monotone: bool
    """False: attainment did not fall with the rate everywhere."""
    outcome: Outcome
    """Outcome of one cell at its share of the requested rate."""
    trace: Trace
    """The requests of `outcome`."""
    span: Span
    """The counted part of `outcome`."""

    def holds(self, attainment: float) -> bool:
        """Whether the attainment target is met at the requested rate."""
        return self.plan.prediction.attainment >= attainment


def predict(
    problem: Problem, trials: Trials, placement: Draft, targets: Targets, algorithm: str
) -> Finalist:
    """Simulate `placement` at the requested rate and around its goodput."""
    fleet, rate = cell_fleet(problem, placement), problem.rate / placement.copies
    span = trials.span(rate, targets)
    outcome = trials.serve(fleet, rate, span)
    seeds = _SEEDS if span.counted < _LONG else _FEW_SEEDS
    goodput_found = goodput.confirm(trials, fleet, targets, Goodput(rate, 0.0), seeds)
    served = goodput_found.rate * placement.copies
    trace = trials.trace(span.total, rate)
    plan = Plan(
        pools=planned_pools(placement),
        prediction=_prediction(placement, outcome, span, targets, goodput_found),
        algorithm=algorithm,
        score=score(placement, served, problem.rate, problem.planning.objective),
        is_gpu_chosen=len({supply.gpu for supply in problem.supplies}) > 1,
        whole_below_tokens=short_prompts.find(problem, placement, outcome, trace),
        ahead_from_tokens=ahead_from_tokens(problem, placement),
    )
    return Finalist(placement, plan, goodput_found.is_monotone, outcome, trace, span)


def score(placement: Draft, served: float, rate: float, objective: Objective) -> float:
    """Served requests per second, at most the requested rate, per GPU, price or watt.

    Goodput above the requested rate has no value yet; a plan should serve that rate with few
    resources.
    """
    return min(served, rate) / placement.resources(objective)


def worst(trusts: list[Trust]) -> Trust:
    """The least reliable one: it limits the prediction of a plan that depends on all."""
    return max(
        trusts,
        key=lambda each: (
            _WORST.index(each.basis),
            math.inf if each.error is None else each.error,
        ),
    )


def percentiles(values: Times) -> Percentiles:
    """P50, P90 and P99; nan (never reached) counts as infinite."""
    ended = np.where(np.isnan(values), np.inf, values)
    p50, p90, p99 = (float(np.quantile(ended, q, method="higher")) for q in (0.5, 0.9, 0.99))
    return Percentiles(p50, p90, p99)


def _prediction(
    placement: Draft, outcome: Outcome, span: Span, targets: Targets, goodput_found: Goodput
) -> Prediction:
    ttft_ms, tpot_ms = outcome.ttft_ms[span.window], outcome.tpot_ms[span.window]
    is_met = (ttft_ms <= targets.ttft_ms) & (tpot_ms <= targets.tpot_ms)
    low, high = goodput_found.interval or (goodput_found.rate, goodput_found.rate)
    return Prediction(
        goodput=goodput_found.rate * placement.copies,
        goodput_interval=(low * placement.copies, high * placement.copies),
        attainment=float(np.mean(is_met)),
        ttft_ms=percentiles(ttft_ms),
        tpot_ms=percentiles(tpot_ms),
        cost_per_hour=placement.cost_per_hour,
        power_watts=placement.power_watts,
        trust=worst([group.instance.candidate.estimate.trust for group in placement.groups]),
    )
