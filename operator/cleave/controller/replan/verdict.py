"""Applies the planner's verdict about the running plan: the outcome of a reconcile. Pure.

Called by `reconcile`, once per verdict.
"""

from dataclasses import dataclass, replace

from cleave.api.planning import PlanningMode
from cleave.api.replan_status import FittedPlanInputs, LatencyCorrection
from cleave.controller.cluster.actions import PlanJob, PlanReview, ReviewResult
from cleave.controller.cluster.conditions import ConditionState
from cleave.controller.cluster.objects import format_timestamp
from cleave.controller.views import DeploymentView
from cleave.manifests.labels import Manifest
from cleave.planner.replan.revision import ReplanVerdict
from cleave.planner.result.status import to_role_pools
from cleave.traffic.drift_detector import TrafficChange

PLAN_DRIFTED, PREDICTION_HOLDS = "PlanDrifted", "PredictionHolds"
"""Condition types."""
APPLIED, PROPOSED, CORRECTED = "Applied", "Proposed", "Corrected"
"""Verdicts as `status.plans` records them."""
_MAX_PAST_PLANS = 10


@dataclass(frozen=True, slots=True)
class ReplanEvent:
    """An Event to emit once."""

    reason: str
    message: str
    is_warning: bool = False


@dataclass(frozen=True, slots=True)
class ReplanOutcome:
    """The contribution of replanning to one reconcile of a deployment."""

    fitted_inputs: FittedPlanInputs | None = None
    """Inputs of the plan from now on, instead of the spec's; None: the spec's."""
    plan_result: PlanJob | None = None
    """The planner's last result, or the plan that a review has applied."""
    plan_request: PlanJob | None = None
    """The request to submit to the planner."""
    conditions: tuple[ConditionState, ...] = ()
    events: tuple[ReplanEvent, ...] = ()
    correction: LatencyCorrection | None = None
    prediction: Manifest | None = None
    plans: tuple[Manifest, ...] = ()
    advice: Manifest | None = None
    """With replan.mode Advisory: the plan that Auto would apply."""


def apply_verdict(
    view: DeploymentView, outcome: ReplanOutcome, change: TrafficChange | None, finished: PlanJob
) -> ReplanOutcome:
    """Return the outcome of a finished review. Raises ValueError when it has no verdict."""
    review, result = finished.review, finished.review_result
    if review is None or result is None:
        raise ValueError("finished: has no verdict; request a review from the planner")
    updated = replace(
        outcome,
        correction=result.correction,
        prediction=result.prediction.model_dump(mode="json", exclude_none=True),
        conditions=(_build_drift_condition(change, result), _build_accuracy_condition(result)),
        advice=None,
        events=(),
    )
    match result.verdict:
        case ReplanVerdict.APPLY:
            updated = _record(updated, review, result, APPLIED, finished.plan)
            updated = replace(updated, events=(ReplanEvent("Replanned", result.reason),))
            return _adopt_plan(view, updated, finished, result)
        case ReplanVerdict.PROPOSE:
            return _propose(view, updated, finished, review, result)
        case ReplanVerdict.CORRECT:
            event = ReplanEvent("ModelCorrected", result.accuracy_message, is_warning=True)
            return replace(_record(updated, review, result, CORRECTED), events=(event,))
        case ReplanVerdict.KEEP if change is not None:
            event = ReplanEvent("PlanKept", f"{change}; {result.reason}")
            return replace(updated, events=(event,))
    return updated


def _build_drift_condition(change: TrafficChange | None, result: ReviewResult) -> ConditionState:
    match result.verdict:
        case ReplanVerdict.APPLY:
            return ConditionState(PLAN_DRIFTED, False, "Replanned", result.reason)
        case ReplanVerdict.PROPOSE:
            return ConditionState(PLAN_DRIFTED, True, PROPOSED, result.reason)
        case ReplanVerdict.CORRECT:
            is_drifted = change is not None
            return ConditionState(PLAN_DRIFTED, is_drifted, CORRECTED, result.accuracy_message)
    if change is None:
        return ConditionState(PLAN_DRIFTED, False, "AsPlanned", result.reason)
    # The change is known and the plan stays: nothing to do.
    return ConditionState(PLAN_DRIFTED, False, "Kept", f"{change}; {result.reason}")


def _build_accuracy_condition(result: ReviewResult) -> ConditionState:
    if result.is_accurate is None:
        return ConditionState(PREDICTION_HOLDS, None, "TooFewAnswers", result.accuracy_message)
    reason = "Holds" if result.is_accurate else "Wrong"
    return ConditionState(PREDICTION_HOLDS, result.is_accurate, reason, result.accuracy_message)


def _adopt_plan(
    view: DeploymentView, outcome: ReplanOutcome, finished: PlanJob, result: ReviewResult
) -> ReplanOutcome:
    """Make the result's plan the current one, together with its inputs."""
    if finished.fitted_inputs is None:
        raise ValueError("finished: lacks the inputs that the plan was made from")
    fitted = finished.fitted_inputs.model_copy(update={"correction": result.correction})
    inputs_hash = view.plan_inputs.hash_with(fitted)
    plan = {**(finished.plan or {}), "inputs": inputs_hash}
    adopted = PlanJob(inputs_hash, view.inventory.node_counts_hash, fitted, plan=plan)
    return replace(outcome, fitted_inputs=fitted, plan_result=adopted)


def _propose(
    view: DeploymentView,
    outcome: ReplanOutcome,
    finished: PlanJob,
    review: PlanReview,
    result: ReviewResult,
) -> ReplanOutcome:
    """Report a proposed plan; the Event is emitted once per proposal."""
    plan = finished.plan or {}
    last = outcome.plans[0] if outcome.plans else {}
    if (last.get("verdict"), last.get("pools")) != (PROPOSED, plan.get("pools")):
        outcome = _record(outcome, review, result, PROPOSED, plan)
        outcome = replace(outcome, events=(ReplanEvent("PlanProposed", result.reason),))
    if view.deployment.spec.planning.mode is PlanningMode.ADVISORY:
        # In Advisory mode every plan is advice: this one replaces the last.
        return _adopt_plan(view, outcome, finished, result)
    return replace(outcome, advice=plan)


def _record(
    outcome: ReplanOutcome,
    review: PlanReview,
    result: ReviewResult,
    verdict: str,
    plan: Manifest | None = None,
) -> ReplanOutcome:
    """Add an entry to the past plans; consecutive corrections are merged into one."""
    entry: Manifest = {
        "at": format_timestamp(review.at_s),
        "verdict": verdict,
        "reason": result.accuracy_message if verdict == CORRECTED else result.reason,
    }
    if plan is not None:
        entry["pools"] = plan["pools"]
    if verdict == APPLIED:
        replaced = to_role_pools(review.pools)
        entry["left"] = [pool.model_dump(mode="json", exclude_none=True) for pool in replaced]
    plans = outcome.plans
    if verdict == CORRECTED and plans and plans[0]["verdict"] == CORRECTED:
        plans = plans[1:]
    return replace(outcome, plans=(entry, *plans)[:_MAX_PAST_PLANS])
