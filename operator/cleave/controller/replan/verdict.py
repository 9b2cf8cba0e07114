"""Applies the planner's verdict about the running plan. Pure.

Called by `reconcile`, once per verdict.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from cleave.api.planning import Mode
from cleave.controller.cluster.actions import PlanOutcome, Review, Reviewed
from cleave.controller.cluster.conditions import Condition
from cleave.controller.cluster.objects import timestamp
from cleave.controller.deployment.placement import inputs
from cleave.controller.replan.outcome import (
    APPLIED,
    CORRECTED,
    DRIFTED,
    HOLDS,
    PROPOSED,
    Event,
    Turn,
)
from cleave.manifests.labels import Manifest
from cleave.planner.replan.revision import Verdict
from cleave.planner.result.status import instances
from cleave.traffic.drift_detector import Change

if TYPE_CHECKING:
    from cleave.controller.deployment.reconcile import DeploymentView

_MOST_PLANS = 10


def follow(
    view: "DeploymentView", outcome: Turn, change: Change | None, finished: PlanOutcome
) -> Turn:
    """Return the outcome of a finished review.

    Raises ValueError when `finished` has no verdict.
    """
    review, review_result = finished.review, finished.reviewed
    if review is None or review_result is None:
        raise ValueError("finished: has no verdict; request a review from the planner")
    updated = replace(
        outcome,
        correction=review_result.correction,
        prediction=review_result.prediction.model_dump(mode="json", exclude_none=True),
        conditions=(_drifted(change, review_result), _holds(review_result)),
        advice=None,
        events=(),
    )
    match review_result.verdict:
        case Verdict.APPLY:
            updated = _remember(updated, review, review_result, APPLIED, finished.plan)
            updated = replace(updated, events=(Event("Replanned", review_result.reason),))
            return _rest_on(view, updated, finished, review_result)
        case Verdict.PROPOSE:
            return _advise(view, updated, finished, review, review_result)
        case Verdict.CORRECT:
            event = Event("ModelCorrected", review_result.judged, is_warning=True)
            return replace(_remember(updated, review, review_result, CORRECTED), events=(event,))
        case Verdict.KEEP if change is not None:
            return replace(
                updated, events=(Event("PlanKept", f"{change}; {review_result.reason}"),)
            )
    return updated


def _drifted(change: Change | None, result: Reviewed) -> Condition:
    match result.verdict:
        case Verdict.APPLY:
            return Condition(DRIFTED, False, "Replanned", result.reason)
        case Verdict.PROPOSE:
            return Condition(DRIFTED, True, PROPOSED, result.reason)
        case Verdict.CORRECT:
            return Condition(DRIFTED, change is not None, CORRECTED, result.judged)
    if change is None:
        return Condition(DRIFTED, False, "AsPlanned", result.reason)
    # The change is known and the plan stays: nothing remains to be done.
    return Condition(DRIFTED, False, "Kept", f"{change}; {result.reason}")


def _holds(result: Reviewed) -> Condition:
    if result.holds is None:
        return Condition(HOLDS, None, "TooFewAnswers", result.judged)
    return Condition(HOLDS, result.holds, "Holds" if result.holds else "Wrong", result.judged)


def _rest_on(
    view: "DeploymentView", outcome: Turn, finished: PlanOutcome, result: Reviewed
) -> Turn:
    """Make the result's plan the one in force, together with its inputs."""
    if finished.basis is None:
        raise ValueError("finished: lacks the inputs that the plan was made from")
    fitted = finished.basis.model_copy(update={"correction": result.correction})
    inputs_hash = inputs(view.deployment, view.inventory, fitted)
    plan = {**(finished.plan or {}), "inputs": inputs_hash}
    adopted = PlanOutcome(inputs_hash, view.inventory.numbers, fitted, plan=plan)
    return replace(outcome, basis=fitted, outcome=adopted)


def _advise(
    view: "DeploymentView", outcome: Turn, finished: PlanOutcome, review: Review, result: Reviewed
) -> Turn:
    """Report a proposed plan; the Event is emitted once per proposal."""
    plan = finished.plan or {}
    last = outcome.plans[0] if outcome.plans else {}
    if (last.get("verdict"), last.get("pools")) != (PROPOSED, plan.get("pools")):
        outcome = _remember(outcome, review, result, PROPOSED, plan)
        outcome = replace(outcome, events=(Event("PlanProposed", result.reason),))
    if view.deployment.spec.planning.mode is Mode.ADVISORY:
        # In Advisory mode every plan is advice: this one replaces the last.
        return _rest_on(view, outcome, finished, result)
    return replace(outcome, advice=plan)


def _remember(
    outcome: Turn, review: Review, result: Reviewed, verdict: str, plan: Manifest | None = None
) -> Turn:
    """Add an entry to the past plans; consecutive corrections are merged into one."""
    entry: Manifest = {
        "at": timestamp(review.at_s),
        "verdict": verdict,
        "reason": result.judged if verdict == CORRECTED else result.reason,
    }
    if plan is not None:
        entry["pools"] = plan["pools"]
    if verdict == APPLIED:
        replaced = instances(review.pools)
        entry["left"] = [pool.model_dump(mode="json", exclude_none=True) for pool in replaced]
    plans = outcome.plans
    if verdict == CORRECTED and plans and plans[0]["verdict"] == CORRECTED:
        plans = plans[1:]
    return replace(outcome, plans=(entry, *plans)[:_MOST_PLANS])
