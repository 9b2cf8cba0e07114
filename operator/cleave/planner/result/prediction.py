"""Predicts a plan: goodput with its interval, and latencies at the requested rate.

Called by the search for the plans that it lists. Trials are long here and repeated with other
seeds; short ones are only good enough to compare.
"""

import math
from dataclasses import dataclass, replace
from typing import TypedDict

import numpy as np

from cleave.api.deployment import Slo
from cleave.api.planning import Objective
from cleave.api.role import Role
from cleave.planner.plan import Percentiles, Plan, Prediction
from cleave.planner.problem import Problem
from cleave.planner.result.simulation_summary import (
    compute_itl_percentiles,
    compute_percentiles,
)
from cleave.planner.search import capacity_bound, goodput
from cleave.planner.search.candidate_placement import (
    CandidatePlacement,
    build_deployed_cell,
    build_kv_link,
    build_transfer,
    compute_ahead_from_tokens,
    find_needed_limit,
    to_planned_pools,
)
from cleave.planner.search.context import SearchContext
from cleave.planner.search.goodput import Goodput
from cleave.planner.search.long_trials import SampledService, sample_service
from cleave.planner.search.trials import RANKING_PRECISION, TrialSpan
from cleave.policy.short_prompts import find_short_prompt_tokens
from cleave.simulator.outcome import SimulationResult
from cleave.simulator.trace import Trace

_SEEDS = 5
_FEW_SEEDS = 3
_LONG_TRIAL_REQUESTS = 30_000
"""Trials of this many requests vary little between seeds, so fewer seeds are enough."""


class _ServiceFields(TypedDict):
    """Of a Prediction."""

    attainment: float
    attainment_error: float
    ttft_attainment: float
    tpot_attainment: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    itl_ms: Percentiles


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

    def holds(self, slo: Slo) -> bool:
        """Whether the targets are met at the requested rate."""
        found = self.plan.prediction
        own = found.ttft_attainment, found.tpot_attainment
        return slo.is_met(found.attainment, *own, found.itl_ms.p99)

    def is_uneven(self, slo: Slo) -> bool:
        """Whether times between tokens miss their target."""
        return self.plan.prediction.itl_ms.p99 > (slo.itl_p99_ms or math.inf)


def predict(search: SearchContext, placement: CandidatePlacement, algorithm: str) -> PredictedPlan:
    """Simulate `placement` at the requested rate and around its goodput, with the threshold for
    short prompts that it is deployed with."""
    problem, trials, targets = search.problem, search.trials, search.targets
    fleet, rate = build_deployed_cell(problem, placement, 0), problem.rate / placement.copies
    # Far above what the fleet can serve, the requests of that rate show the same.
    near = min(rate, capacity_bound.compute_fleet_rate(fleet, trials.get_lengths()))
    span = trials.compute_span(near, targets)
    outcome, trace = trials.simulate(fleet, rate, span), trials.build_trace(span.total, rate)
    found = sample_service(trials, fleet, rate, span, targets)
    whole_below = compute_whole_below_tokens(problem, placement, outcome, trace)
    if whole_below:
        with_threshold = replace(fleet, short_prompt_tokens=whole_below)
        shared = sample_service(trials, with_threshold, rate, span, targets)
        # A decode instance with just enough room for its own work cannot take prompts as well.
        if shared.share >= min(found.share, targets.attainment):
            fleet, found = with_threshold, shared
            outcome = trials.simulate(fleet, rate, span)
        else:
            whole_below = 0
    seeds = _SEEDS if span.counted < _LONG_TRIAL_REQUESTS else _FEW_SEEDS
    short = trials.with_precision(RANKING_PRECISION)
    likely = Goodput(goodput.find_goodput_near(short, fleet, targets, near).rate, 0.0)
    goodput_found = goodput.confirm_goodput(trials, fleet, targets, likely, seeds)
    plan = Plan(
        pools=to_planned_pools(placement),
        prediction=_build_prediction(placement, outcome, span, found, goodput_found),
        algorithm=algorithm,
        # Goodput above the requested rate has no value yet; a plan should serve that rate with few
        # resources.
        score=min(goodput_found.rate * placement.copies, problem.rate)
        / search.get_resources(placement),
        cells=placement.copies,
        is_gpu_chosen=len({supply.gpu for supply in problem.supplies}) > 1,
        whole_below_tokens=whole_below,
        ahead_from_tokens=compute_ahead_from_tokens(problem, placement),
        max_model_len=find_needed_limit(problem, placement),
    )
    return PredictedPlan(placement, plan, goodput_found.is_monotone, outcome, trace, span)


def resample(search: SearchContext, predicted: PredictedPlan) -> PredictedPlan:
    """The same plan with what more samples show of the requested rate: those by which it was chosen
    flatter it."""
    problem, placement, plan = search.problem, predicted.placement, predicted.plan
    fleet = build_deployed_cell(problem, placement, plan.whole_below_tokens)
    rate, span = problem.rate / placement.copies, predicted.span
    found = sample_service(search.trials, fleet, rate, span, search.targets, is_shown=True)
    prediction = replace(plan.prediction, **_describe_service(found))
    return replace(predicted, plan=replace(plan, prediction=prediction))


def compute_whole_below_tokens(
    problem: Problem, placement: CandidatePlacement, outcome: SimulationResult, trace: Trace
) -> int:
    """Longest prompt that a decode instance should compute itself, in tokens; 0: none.

    `outcome` is that of one cell of `placement` serving `trace` without such prompts: it shows how
    full a decode instance usually is. Rounded down to a power of two so that small changes do not
    change it.
    """
    engines = {group.role: group.instance.engine for group in placement.groups}
    if Role.PREFILL not in engines or Role.DECODE not in engines:
        return 0
    # Prefill instances come first; flipped ones decode a little.
    others = slice(placement.count_replicas(Role.PREFILL) * engines[Role.PREFILL].ranks, None)
    batches = outcome.instances.mean_batch[others]
    batches = batches[outcome.instances.decode_iterations[others] > 0]
    if not len(batches):
        return 0
    batch = max(round(float(np.mean(batches))), 1)
    context = float(np.mean(trace.prompt_tokens + trace.output_tokens / 2))
    moved = build_transfer(problem, placement)
    tokens = find_short_prompt_tokens(
        engines[Role.PREFILL].timing,
        engines[Role.DECODE].timing,
        moved.latency_ms,
        moved.token_ms,
        batch,
        round(batch * context),
        problem.slo.tpot_ms,
    )
    return 1 << tokens.bit_length() >> 1


def _build_prediction(
    placement: CandidatePlacement,
    outcome: SimulationResult,
    span: TrialSpan,
    found: SampledService,
    goodput_found: Goodput,
) -> Prediction:
    low, high = goodput_found.interval or (goodput_found.rate, goodput_found.rate)
    return Prediction(
        goodput=goodput_found.rate * placement.copies,
        goodput_interval=(low * placement.copies, high * placement.copies),
        **_describe_service(found),
        cost_per_hour=placement.get_resources(Objective.COST),
        power_watts=placement.get_resources(Objective.POWER),
        trust=max(
            (group.instance.candidate.estimate.confidence for group in placement.groups),
            key=lambda each: each.rank,
        ),
        kv_link=build_kv_link(placement),
        cached_share=_compute_cached_share(outcome, span),
    )


def _describe_service(found: SampledService) -> "_ServiceFields":
    return {
        "attainment": found.attainment,
        "attainment_error": found.error,
        "ttft_attainment": found.ttft_share,
        "tpot_attainment": found.tpot_share,
        "ttft_ms": compute_percentiles(found.ttft_ms),
        "tpot_ms": compute_percentiles(found.tpot_ms),
        "itl_ms": compute_itl_percentiles(found.itl),
    }


def _compute_cached_share(outcome: SimulationResult, span: TrialSpan) -> float:
    prompts = outcome.prompt_tokens[span.window]
    cached = outcome.cached_tokens + outcome.loaded_tokens
    return float(cached[span.window].sum() / prompts.sum())
