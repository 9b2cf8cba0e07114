"""Predicts the selected plan as a mean over several samples of requests, as many as it takes.

Called by `plan_search.plan` after ranking. What is hard: fleets that are short of memory serve one
sample of requests in time and hardly half of another one, so that one sample says little, and the
sample in which a plan was found flatters it. The samples here are none of the search's.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from cleave.planner.plan import PlanVerdict
from cleave.planner.result.prediction import PredictedPlan
from cleave.planner.result.simulation_summary import compute_percentiles
from cleave.planner.result.text import WIDE_ERROR
from cleave.planner.result.verdict import Ranking, rank_plans
from cleave.planner.search.candidate_placement import build_deployed_cell
from cleave.planner.search.context import SearchContext
from cleave.planner.search.goodput import compute_half_interval
from cleave.planner.search.trials import CONFIRMATION_PRECISION, Targets, Trials
from cleave.simulator.fleet import SimulatedFleet
from cleave.simulator.outcome import Times

_FIRST_SEED = 101
"""Added to the seed of the problem; searches add less."""
_FEWEST, _MOST = 3, 30
"""Samples. The goodput of each plan takes about 25 trials, so this is a small part of the time."""


@dataclass(frozen=True, slots=True)
class SampledService:
    """What a fleet does with several samples of requests."""

    attainment: float
    """Mean share of the requests that meet both targets."""
    error: float
    """Half of its 95 % confidence interval."""
    ttft_ms: Times
    """Of the requests of all samples."""
    tpot_ms: Times


def confirm_best(search: SearchContext, ranking: Ranking) -> Ranking:
    """`ranking` with its selected plan confirmed; the next one that holds is selected where that
    surely does not. If none holds, the first one stays."""
    first = None
    while ranking.verdict is not PlanVerdict.INFEASIBLE:
        best, *others = ranking.ordered
        confirmed = confirm(search, best)
        first = first or replace(ranking, ordered=(confirmed, *others))
        prediction = confirmed.plan.prediction
        if prediction.attainment + prediction.attainment_error >= search.targets.attainment:
            return replace(ranking, ordered=(confirmed, *others))
        ranking = rank_plans(search.problem, (confirmed, *others))
    return first or ranking


def confirm(search: SearchContext, predicted: PredictedPlan) -> PredictedPlan:
    """The same plan with the attainment and latencies of several samples."""
    placement, plan = predicted.placement, predicted.plan
    fleet = build_deployed_cell(search.problem, placement, plan.whole_below_tokens)
    trials = search.trials.with_precision(CONFIRMATION_PRECISION)
    rate = search.problem.rate / placement.copies
    found = sample_service(trials, fleet, rate, search.targets)
    prediction = replace(
        plan.prediction,
        attainment=found.attainment,
        attainment_error=found.error,
        ttft_ms=compute_percentiles(found.ttft_ms),
        tpot_ms=compute_percentiles(found.tpot_ms),
    )
    return replace(predicted, plan=replace(plan, prediction=prediction))


def sample_service(
    trials: Trials, fleet: SimulatedFleet, rate: float, targets: Targets
) -> SampledService:
    """Serve samples of requests until the mean is good enough or there are enough of them."""
    span = trials.compute_span(rate, targets)
    shares: list[float] = []
    latencies: list[tuple[Times, Times]] = []
    error = math.inf
    while len(shares) < _FEWEST or (error > WIDE_ERROR and len(shares) < _MOST):
        other = trials.with_seed(trials.seed + _FIRST_SEED + len(shares))
        outcome = other.simulate(fleet, rate, span)
        ttft_ms, tpot_ms = outcome.ttft_ms[span.window], outcome.tpot_ms[span.window]
        latencies.append((ttft_ms, tpot_ms))
        shares.append(float(np.mean((ttft_ms <= targets.ttft_ms) & (tpot_ms <= targets.tpot_ms))))
        error = compute_half_interval(shares) if len(shares) > 1 else math.inf
    ttft_ms, tpot_ms = map(np.concatenate, zip(*latencies, strict=True))
    return SampledService(float(np.mean(shares)), error, ttft_ms, tpot_ms)
