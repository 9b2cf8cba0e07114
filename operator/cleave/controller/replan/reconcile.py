"""Decides when to review the running plan, and applies the planner's results. Pure.

Called by the deployment's reconcile. Traffic is compared with the planned one. When it changes, and
periodically, the planner reviews the running plan (`replan.review`, in its process), and its
verdict is applied here, once. Only recent traffic is kept in memory; everything else is in the
status, so that a restart neither loses a plan nor triggers one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from cleave.api.deployment import LLMDeployment
from cleave.api.planning import PlanningMode, ReplanMode
from cleave.api.pool import ReplicasOwner
from cleave.api.replan_status import FittedPlanInputs, PastPlan
from cleave.controller.cluster import conditions
from cleave.controller.cluster.actions import PlanJob, PlanReview
from cleave.controller.cluster.conditions import ConditionState
from cleave.controller.cluster.objects import format_timestamp, parse_timestamp
from cleave.controller.deployment.lending import is_lending
from cleave.controller.deployment.scaling import count_engines
from cleave.controller.replan import drift
from cleave.controller.replan.drift import find_current_start_s, find_settle_s, list_recent
from cleave.controller.replan.inputs import get_planned_workload, read_placement
from cleave.controller.replan.verdict import (
    APPLIED,
    CORRECTED,
    PLAN_DRIFTED,
    PREDICTION_HOLDS,
    PROPOSED,
    ReplanEvent,
    ReplanOutcome,
    apply_verdict,
)
from cleave.controller.views import DeploymentView, DriftState
from cleave.manifests.labels import Manifest
from cleave.planner.placement import to_planned_pool
from cleave.planner.plan import PlannedPool
from cleave.planner.replan.model_check import MIN_RESPONSES, SETTLE_S
from cleave.planner.replan.revision import ReplacedPlan, ReplanSettings
from cleave.planner.resolved_deployment import ResolvedDeployment
from cleave.traffic.drift_detector import TrafficChange
from cleave.traffic.refit import RefitError, refit
from cleave.traffic.window import TrafficWindow, list_settled

_SOONER_DIVISOR = 5
"""After a model correction or a change of traffic the next review comes after this fraction of the
interval. Windows this soon after a change still mix both sides of it (at most a minute)."""
_HORIZON_INTERVALS = 12
"""Intervals for which traffic is assumed to stay as it is: an hour with the default interval."""
_NOT_COMPARED_MESSAGE = "nothing was compared yet"


def is_enabled(deployment: LLMDeployment) -> bool:
    """Whether the gateways' counters are needed for replanning."""
    return deployment.spec.planning.replan.mode is not ReplanMode.OFF


def reconcile_plan(view: DeploymentView) -> ReplanOutcome:
    """Return the outcome of replanning from observed traffic and the planner's last result.

    1. Read what the status records. 2. Apply a new result. 3. Else report a change of traffic, and
    request a review when one is due.
    """
    deployment, status = view.deployment, view.status
    recorded = ReplanOutcome(
        fitted_inputs=view.plan_inputs.read_fitted(status),
        plan_result=view.plan_result,
        correction=view.plan_inputs.read_correction(status),
        plans=tuple(status.get("plans", ())),
    )
    if not _is_reviewed(deployment) or view.plan_inputs.unknown_model is not None:
        # A model that the planner does not know cannot be reviewed.
        return recorded
    prediction = status.get("prediction")
    recorded = replace(recorded, conditions=_read_conditions(status), prediction=prediction)
    if any(each.type == PLAN_DRIFTED and each.reason == PROPOSED for each in recorded.conditions):
        recorded = replace(recorded, advice=status.get("advice"))
    if deployment.spec.paused:
        return recorded
    change = view.drift.change
    finished = _get_new_result(view)
    if finished is not None:
        return apply_verdict(view, recorded, change, finished)
    return replace(
        _report_change(_report_failed_review(view, recorded), change, _get_last_review_s(status)),
        plan_request=_build_due_request(view, recorded, change),
    )


def update_drift(
    state: DriftState, deployment: LLMDeployment, status: Manifest, windows: Iterable[TrafficWindow]
) -> DriftState:
    """Compare new windows with the traffic that the plan was made for."""
    planned_for = get_planned_workload(deployment, status)
    return drift.update(state, planned_for, windows, _find_settled_s(status))


def is_urgent(state: DriftState, resolved: ResolvedDeployment, status: Manifest) -> bool:
    """Whether a change was detected that no review has covered yet."""
    change = state.change if _is_reviewed(resolved.written) else None
    if change is None or not _is_after(change, _get_last_review_s(status)):
        return False
    return resolved.unknown_model is None


def _is_reviewed(deployment: LLMDeployment) -> bool:
    """Whether the running plan is reviewed; a manual placement is in Advisory mode only."""
    spec = deployment.spec
    is_manual = spec.placement is not None and spec.planning.mode is not PlanningMode.ADVISORY
    return is_enabled(deployment) and not is_manual


def _read_conditions(status: Manifest) -> tuple[ConditionState, ...]:
    """The present conditions stay until there is a new result."""
    recorded = {each.type: each for each in conditions.read(status)}
    return tuple(
        recorded.get(kind, ConditionState(kind, None, "NotCompared", _NOT_COMPARED_MESSAGE))
        for kind in (PLAN_DRIFTED, PREDICTION_HOLDS)
    )


def _report_change(
    recorded: ReplanOutcome, change: TrafficChange | None, reviewed_s: float
) -> ReplanOutcome:
    """Report a detected change at once, before its review has finished."""
    drifted, *rest = recorded.conditions
    if change is None or drifted.status or not _is_after(change, reviewed_s):
        return recorded
    text = f"{change}; looking for a better plan"
    condition = ConditionState(PLAN_DRIFTED, True, "TrafficChanged", text)
    event = ReplanEvent(PLAN_DRIFTED, f"traffic is not what was planned for: {change}")
    return replace(recorded, conditions=(condition, *rest), events=(event,))


def _report_failed_review(view: DeploymentView, recorded: ReplanOutcome) -> ReplanOutcome:
    """Report a review that failed; it is requested again when due."""
    outcome = view.plan_result
    if outcome is None or outcome.review is None or not outcome.faults:
        return recorded
    drifted, _ = recorded.conditions
    failed = ConditionState(PREDICTION_HOLDS, None, "NotCompared", "; ".join(outcome.faults))
    return replace(recorded, conditions=(drifted, failed))


def _find_settled_s(status: Manifest) -> float | None:
    """Time since which the fleet is as desired; None: it is not."""
    for each in status.get("conditions", ()):
        if each["type"] == "Progressing" and each["status"] == "False":
            return parse_timestamp(each["lastTransitionTime"])
    return None


def _is_after(change: TrafficChange, at_s: float) -> bool:
    """Compare in whole seconds, as the status has no fractions."""
    return int(change.detected_s) > at_s


def _get_last_review_s(status: Manifest) -> float:
    """Time of the last review."""
    return parse_timestamp(status.get("prediction", {}).get("at")) or 0.0


def _get_new_result(view: DeploymentView) -> PlanJob | None:
    """Return a finished review that is still valid and was not applied yet; else None."""
    outcome = view.plan_result
    if outcome is None or outcome.review is None or outcome.review_result is None:
        return None
    if outcome.inputs_hash != view.plan_inputs.hash_with(outcome.fitted_inputs):
        return None
    reviewed_at = view.status.get("prediction", {}).get("at")
    return None if reviewed_at == format_timestamp(outcome.review.at_s) else outcome


def _build_due_request(
    view: DeploymentView, recorded: ReplanOutcome, change: TrafficChange | None
) -> PlanJob | None:
    """Return the request for a review if one is due and enough traffic was observed."""
    settled_s, current_pools = _find_settled_s(view.status), _read_current_pools(view)
    if view.pending_plan is not None or settled_s is None or not current_pools:
        return None
    if is_lending(view.status):
        # Its instances are fewer than the plan's, so they say nothing about the plan.
        return None
    if not _is_due(view, recorded, change, settled_s):
        return None
    since_s = find_current_start_s(view.windows, change, settled_s)
    settings = _build_settings(view)
    settle_s = find_settle_s(view.windows, change, since_s, settings.settle_s)
    settings = replace(settings, settle_s=settle_s)
    # The model check skips the windows of `settle_s` at their beginning.
    recent = list_recent(view.windows, since_s, settings.cooldown_s, settings.settle_s)
    if change is None and not _has_enough_requests(recent, settings):
        # Traffic is as planned: wait until the model can be checked as well.
        return None
    try:
        workload = refit(recent)
    except RefitError:
        return None
    # `spec.workload.reuse` counts before what was observed: each of several gateways knows only the
    # prompts that it has sent.
    declared = view.deployment.spec.workload
    if declared and declared.reuse:
        workload = workload.model_copy(update={"reuse": declared.reuse})
    of = view.plan_inputs.workload_hash
    fitted = FittedPlanInputs(workload=workload, correction=recorded.correction, of=of)
    plan = view.status.get("plan", {})
    review = PlanReview(
        view.now_s,
        current_pools,
        str(plan.get("algorithm", "")),
        recent,
        settings,
        tuple(_read_past_plans(recorded.plans)),
        plan.get("maxModelLen"),
    )
    inputs_hash, model_hash = view.plan_inputs.hash_with(fitted), view.plan_inputs.model_hash
    return PlanJob(inputs_hash, view.inventory.node_counts_hash, fitted, review, model_hash)


def _is_due(
    view: DeploymentView, recorded: ReplanOutcome, change: TrafficChange | None, settled_s: float
) -> bool:
    review = view.plan_result.review if view.plan_result else None
    requested_s = review.at_s if review else 0.0
    last_s = max(requested_s, _get_last_review_s(view.status), settled_s)
    if change is not None and _is_after(change, last_s):
        return True
    is_corrected = any(each.reason == CORRECTED for each in recorded.conditions)
    interval_s = view.deployment.spec.planning.replan.interval_s
    is_soon = is_corrected or view.drift.has_recent_change(view.now_s, interval_s)
    overdue_s = view.now_s - last_s - interval_s / (_SOONER_DIVISOR if is_soon else 1)
    return overdue_s >= 0 and not view.drift.should_defer_review(overdue_s, interval_s)


def _has_enough_requests(windows: Sequence[TrafficWindow], settings: ReplanSettings) -> bool:
    settled = list_settled(windows, settings.settle_s)
    return sum(min(each.ttft.num, each.tpot.num) for each in settled) >= MIN_RESPONSES


def _read_current_pools(view: DeploymentView) -> tuple[PlannedPool, ...]:
    """The current plan, with the present replicas of its pools."""
    counts = count_engines(view.pools)
    try:
        planned = read_placement(view.status.get("plan", {})).pools
    except ValueError:
        return ()
    current = (replace(pool, replicas=counts.get(pool.role, 0)) for pool in planned)
    return tuple(pool for pool in current if pool.replicas)


def _build_settings(view: DeploymentView) -> ReplanSettings:
    planning = view.deployment.spec.planning
    replan = planning.replan
    is_scaled_by_others = any(pool.spec.owner is not ReplicasOwner.PLAN for pool in view.pools)
    return ReplanSettings(
        is_advisory=is_scaled_by_others
        or planning.mode is PlanningMode.ADVISORY
        or replan.mode is ReplanMode.ADVISORY,
        min_gain=replan.min_gain,
        error_threshold=replan.drift_threshold,
        horizon_s=float(_HORIZON_INTERVALS * replan.interval_s),
        settle_s=min(SETTLE_S, replan.interval_s / _SOONER_DIVISOR),
        start_s=_estimate_start_s(view),
        cooldown_s=float(replan.interval_s),
    )


def _estimate_start_s(view: DeploymentView) -> float:
    """Shortest start of the running instances; `ready_s` may be that of a later recovery."""
    starts = (pod.ready_s - pod.created_s for pod in view.pods if pod.ready and pod.ready_s)
    return min(starts, default=ReplanSettings().start_s)


def _read_past_plans(plans: Iterable[Manifest]) -> Iterator[ReplacedPlan]:
    for each in plans:
        try:
            past = PastPlan.read_status(each)
        except ValueError:
            # Of a later version of Cleave, before a roll-back.
            continue
        if past.verdict == APPLIED:
            yield ReplacedPlan(tuple(map(to_planned_pool, past.left)), past.at.timestamp())
