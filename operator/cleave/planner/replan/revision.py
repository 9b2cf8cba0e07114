"""Decides whether another plan replaces the running one. The entry point of replanning. Pure.

Called by the operator, in the planner's process, after the traffic has changed or the model was
corrected, and by the benchmark that simulates whole days. DistServe, section 4.3, replans when the
pattern shifts; it does not treat the cost of a change, nor errors of the model. What is hard: to
change plans rarely and correctly. A plan is applied only if the model is right about the running
plan, if it is better by more than a minimum, if its gain exceeds the cost of the change, and not
soon after the last change.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from cleave.api.deployment import Slo
from cleave.perf import latency_correction
from cleave.perf.latency_correction import NO_CORRECTION, Correction
from cleave.planner import plan_search
from cleave.planner.plan import Plan, PlannedPool, PlanningResult
from cleave.planner.pool_simulation import to_candidate_placement
from cleave.planner.problem import Problem
from cleave.planner.replan import model_check
from cleave.planner.replan.model_check import MIN_RESPONSES, ModelAssessment
from cleave.planner.replan.replay import RunningPlan, build_placement, predict_attainment
from cleave.planner.replan.restarts import count_kinds, count_starts, reduce_restarts
from cleave.planner.result.prediction import predict
from cleave.planner.result.text import format_percent, format_pool
from cleave.planner.search.context import SearchContext
from cleave.planner.search.trials import CONFIRMATION_PRECISION, Targets
from cleave.traffic.refit import compute_margin, to_demand
from cleave.traffic.window import MIN_GAPS, TrafficWindow, join_windows, list_settled

_TRAFFIC_MARGIN = 0.05
"""Additional traffic that a plan with fewer resources must serve, beyond the statistical margin:
the model may be a little fast."""
_ATTAINMENT_MARGIN = 0.25
"""A plan with fewer resources must exceed the attainment target by this share of the distance to 1;
else the next burst would bring the former plan back."""


class ReplanVerdict(StrEnum):
    """What happens to the running plan."""

    KEEP = "Keep"
    """The running plan stays."""
    CORRECT = "Correct"
    """The running plan stays, because the model is wrong about it; the model is corrected first."""
    PROPOSE = "Propose"
    """Another plan is better; it is only reported."""
    APPLY = "Apply"
    """Another plan is better and replaces the running one."""


@dataclass(frozen=True, slots=True)
class ReplanSettings:
    """How readily plans are changed."""

    is_advisory: bool = False
    """Whether plans are reported but not applied."""
    min_gain: float = 0.1
    """Smallest relative gain that is worth a change."""
    error_threshold: float = model_check.ERROR_THRESHOLD
    """Prediction error above which no plan is changed."""
    horizon_s: float = 3600.0
    """Assumed duration of the present traffic, in which a change has to pay for its cost."""
    settle_s: float = model_check.SETTLE_S
    """For this long after a change, latencies still contain requests from before it."""
    start_s: float = 120.0
    """From the creation of an instance to its first request."""
    cooldown_s: float = 600.0
    """Shortest time between two changes, and of observed traffic before scaling down."""


@dataclass(frozen=True, slots=True)
class ReplacedPlan:
    """Pools of a plan that was replaced."""

    pools: tuple[PlannedPool, ...]
    until_s: float
    """When it was replaced."""


@dataclass(frozen=True, slots=True)
class PlanForecast:
    """Predicted attainment of some pools under the observed traffic, by the corrected model."""

    pools: tuple[PlannedPool, ...]
    attainment: float
    resources: float
    """In the unit of the objective: GPUs, price of an hour, or watts."""
    observed_attainment: float = 1.0
    """Observed attainment; 1 where nothing was observed, such as for a plan that does not run."""

    @property
    def min_attainment(self) -> float:
        """The lower of predicted and observed attainment."""
        return min(self.attainment, self.observed_attainment)


@dataclass(frozen=True, slots=True)
class ReplanDecision:
    """What to do with the running plan, and why."""

    verdict: ReplanVerdict
    reason: str
    """One sentence for status."""
    gain: float = 0.0
    """Relative gain: requests in time, or, where both plans meet the targets, resources saved."""


@dataclass(frozen=True, slots=True)
class Revision:
    """Result of one review of the running plan."""

    decision: ReplanDecision
    assessment: ModelAssessment
    result: PlanningResult | None = None
    """The planner's result; None: not planned, because the model is wrong."""
    proposal: Plan | None = None
    """The plan that was compared with the running one."""


def revise(
    problem: Problem,
    running_plan: RunningPlan,
    windows: Sequence[TrafficWindow],
    correction: Correction = NO_CORRECTION,
    settings: ReplanSettings = ReplanSettings(),
    replaced_plans: Sequence[ReplacedPlan] = (),
) -> Revision:
    """Assess the model by the running plan, replan if the model is right, and decide.

    The traffic of `problem` is replaced by that of `windows`, during which only `running_plan`
    served, in the same conversations; its model is the uncorrected one. 1. Assess and correct the
    model; stop if it is wrong. 2. Plan for the observed traffic plus a margin. 3. Reuse limits of
    running instances where that avoids restarts. 4. Compare both plans. Raises RefitError (too few
    requests) and PlanError.
    """
    demand = to_demand(windows).with_reuse_of(problem.demand)
    demand = replace(demand, max_model_len=problem.demand.max_model_len)
    observed = replace(problem, demand=demand)
    limit, settle_s = settings.error_threshold, settings.settle_s
    assessment = model_check.assess(observed, running_plan, windows, correction, limit, settle_s)
    if not assessment.holds:
        return Revision(ReplanDecision(ReplanVerdict.CORRECT, assessment.reason), assessment)
    estimator = latency_correction.apply_correction(problem.estimator, assessment.correction)
    mean_problem = replace(problem, demand=demand, estimator=estimator)
    # Rate the current plan at the mean traffic, without the margin, but by its observed misses too.
    current = replace(
        _forecast(mean_problem, running_plan),
        observed_attainment=compute_observed_attainment(windows, problem.slo, settle_s),
    )
    margin = compute_margin(windows)
    if current.min_attainment >= problem.slo.attainment:
        margin += _TRAFFIC_MARGIN
    peak_problem = replace(mean_problem, demand=demand.with_rate(demand.rate * (1 + margin)))
    result = plan_search.plan(peak_problem)
    best = result.best
    if best is None:
        return Revision(ReplanDecision(ReplanVerdict.KEEP, result.reason), assessment, result)
    best = _reduce_restarts(peak_problem, running_plan.pools, best, settings)
    proposed_plan = running_plan.change_plan(best)
    proposed = _forecast(peak_problem, proposed_plan)
    at_s, observed_s = windows[-1].end_s, sum(each.length_s for each in windows)
    decision = decide(mean_problem, current, proposed, settings, at_s, replaced_plans, observed_s)
    return Revision(decision, assessment, result, best)


def decide(
    problem: Problem,
    current: PlanForecast,
    proposed: PlanForecast,
    settings: ReplanSettings,
    at_s: float,
    replaced_plans: Sequence[ReplacedPlan] = (),
    observed_s: float = math.inf,
) -> ReplanDecision:
    """Whether `proposed` replaces `current`; `observed_s` is for how long traffic was observed."""
    if count_kinds(current.pools) == count_kinds(proposed.pools):
        return ReplanDecision(ReplanVerdict.KEEP, "the current plan is still the best")
    target = problem.slo.attainment
    gain = _compute_gain(current, proposed, target)
    keep = (
        _explain_cooldown(current, target, settings, at_s, replaced_plans)
        or _explain_small_gain(problem, current, proposed, settings, gain)
        or (
            _explain_no_shrink(proposed, settings, at_s, replaced_plans, observed_s)
            if current.min_attainment >= target
            else None
        )
    )
    if keep is not None:
        return ReplanDecision(ReplanVerdict.KEEP, keep, gain)
    verdict = ReplanVerdict.PROPOSE if settings.is_advisory else ReplanVerdict.APPLY
    return ReplanDecision(verdict, _describe_change(current, proposed, target), gain)


def _reduce_restarts(
    problem: Problem, current: tuple[PlannedPool, ...], best: Plan, settings: ReplanSettings
) -> Plan:
    """`best`, or the same with limits of running instances where that serves as well. An instance
    that restarts does not serve meanwhile; better limits have to make up for that."""

    def predict_pools(pools: tuple[PlannedPool, ...]) -> float:
        plan = RunningPlan(pools, best.algorithm, whole_below_tokens=best.whole_below_tokens)
        return predict_attainment(problem, plan)

    target, at_best = problem.slo.attainment, predict_pools(best.pools)
    min_attainment = min(at_best, target + _ATTAINMENT_MARGIN * (1 - target))

    def serves(pools: tuple[PlannedPool, ...], avoided: int) -> bool:
        lost = avoided / _count_instances(pools) * settings.start_s / settings.horizon_s
        return predict_pools(pools) >= max(min_attainment, at_best - lost)

    pools = reduce_restarts(current, best.pools, serves)
    if pools == best.pools:
        return best
    placement = to_candidate_placement(problem, pools, best.algorithm, best.cells)
    search = SearchContext.from_problem(problem).with_precision(CONFIRMATION_PRECISION)
    return predict(search, placement, best.algorithm).plan


def _forecast(problem: Problem, running_plan: RunningPlan) -> PlanForecast:
    resources = build_placement(problem, running_plan).get_resources(problem.planning.objective)
    return PlanForecast(running_plan.pools, predict_attainment(problem, running_plan), resources)


def compute_observed_attainment(
    windows: Sequence[TrafficWindow], slo: Slo, settle_s: float
) -> float:
    """Attainment outside of draining backlogs, less where a target of its own is missed by more; 1
    where too few responses were measured."""
    settled = list_settled(windows, settle_s)
    if sum(each.measured for each in settled) < MIN_RESPONSES:
        return 1.0
    observed = join_windows(settled)
    targets, measured = Targets.from_slo(slo), observed.measured
    is_enough = observed.itl.num >= MIN_GAPS
    tokens = observed.itl.compute_share(targets.itl_p99_ms / 1000) if is_enough else 1.0
    ttft, tpot = observed.ttft_attained / measured, observed.tpot_attained / measured
    return min(observed.attained / measured, *targets.scale_own(ttft, tpot, tokens))


def _compute_gain(current: PlanForecast, proposed: PlanForecast, target: float) -> float:
    if current.min_attainment >= target and proposed.attainment >= target:
        return current.resources / proposed.resources - 1
    return proposed.attainment / current.min_attainment - 1 if current.min_attainment else math.inf


def _explain_cooldown(
    current: PlanForecast,
    target: float,
    settings: ReplanSettings,
    at_s: float,
    replaced_plans: Sequence[ReplacedPlan],
) -> str | None:
    """Why no change so soon after the last one; None where the running plan misses badly."""
    since_s = at_s - max((each.until_s for each in replaced_plans), default=-math.inf)
    if since_s >= settings.cooldown_s or current.min_attainment < target / 2:
        return None
    return f"the plan was changed {since_s:.0f} s ago; it stays for {settings.cooldown_s:.0f} s"


def _explain_no_shrink(
    proposed: PlanForecast,
    settings: ReplanSettings,
    at_s: float,
    replaced_plans: Sequence[ReplacedPlan],
    observed_s: float,
) -> str | None:
    """Why not to scale down; strict, as missing instances cost more than superfluous ones."""
    if observed_s < settings.cooldown_s:
        required = f"{settings.cooldown_s:.0f} s are required to scale down"
        return f"traffic was observed for {observed_s:.0f} s; {required}"
    for each in replaced_plans:
        age_s = at_s - each.until_s
        is_same = count_kinds(each.pools) == count_kinds(proposed.pools)
        if is_same and age_s < 2 * settings.cooldown_s:
            pools = _format_pools(proposed.pools)
            return f"{pools} was replaced {age_s:.0f} s ago; traffic may swing back"
    return None


def _explain_small_gain(
    problem: Problem,
    current: PlanForecast,
    proposed: PlanForecast,
    settings: ReplanSettings,
    gain: float,
) -> str | None:
    target, starts = problem.slo.attainment, count_starts(current.pools, proposed.pools)
    label, meets = _format_pools(proposed.pools), "the current plan meets the targets"
    if current.min_attainment >= target:
        if proposed.attainment < target + _ATTAINMENT_MARGIN * (1 - target):
            return f"{meets}; {label} would have too little margin"
        if gain < settings.min_gain:
            return f"{meets}; {label} needs {'only slightly less' if gain > 0.0 else 'no less'}"
        started = starts / _count_instances(proposed.pools)
        start_cost = started * proposed.resources * settings.start_s
        if (current.resources - proposed.resources) * settings.horizon_s <= start_cost:
            return f"starting {starts} instances costs more than {label} saves"
        return None
    if current.attainment >= target and proposed.resources <= current.resources:
        # The model does not explain it; it would be as wrong about another plan of that size.
        return f"the current plan misses more than predicted; {label} needs no more resources"
    if gain < settings.min_gain and proposed.attainment < target:
        return f"{label} would serve {max(gain, 0):.0%} more in time; too little"
    won = (proposed.attainment - current.min_attainment) * problem.rate * settings.horizon_s
    # Instances that stop before their replacements have started do not serve meanwhile.
    replaced = min(starts, count_starts(proposed.pools, current.pools))
    share = replaced / _count_instances(current.pools)
    cost = share * current.min_attainment * problem.rate * settings.start_s
    if won <= cost:
        return f"the change would cost {cost:.0f} requests and win {max(won, 0):.0f}"
    return None


def _describe_change(current: PlanForecast, proposed: PlanForecast, target: float) -> str:
    before, after = _format_pools(current.pools), _format_pools(proposed.pools)
    attained = f"{after} has {format_percent(proposed.attainment)} of the requests in time"
    if current.min_attainment < target:
        return f"{attained} where {before} has {format_percent(current.min_attainment)}"
    taken = proposed.resources / current.resources
    return f"{attained} for {format_percent(taken)} of what {before} takes"


def _format_pools(pools: Iterable[PlannedPool]) -> str:
    return " + ".join(map(format_pool, pools))


def _count_instances(pools: Iterable[PlannedPool]) -> int:
    return sum(pool.replicas for pool in pools)
