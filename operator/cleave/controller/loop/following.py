"""What follows from the planner's verdict on what runs. Pure; called by `replanning`, once each."""

from dataclasses import replace
from typing import TYPE_CHECKING

from cleave.api.planning import Mode
from cleave.controller.actions import PlanOutcome, Review, Reviewed
from cleave.controller.conditions import Condition
from cleave.controller.loop.turn import (
    APPLIED,
    CORRECTED,
    DRIFTED,
    HOLDS,
    PROPOSED,
    Event,
    Turn,
)
from cleave.controller.observed import timestamp
from cleave.controller.placing import inputs
from cleave.planner.revision import Verdict
from cleave.planner.summary import instances
from cleave.pods.labels import Manifest
from cleave.traffic.change import Change

if TYPE_CHECKING:
    from cleave.controller.deployment import DeploymentView

_MOST_PLANS = 10


def follow(
    view: "DeploymentView", before: Turn, change: Change | None, answered: PlanOutcome
) -> Turn:
    """Take up the verdict of an answered review."""
    review, told = answered.review, answered.reviewed
    if review is None or told is None:
        raise ValueError("answered: holds no verdict; ask the planner for a review")
    now = replace(
        before,
        correction=told.correction,
        prediction=told.prediction.model_dump(mode="json", exclude_none=True),
        conditions=(_drifted(change, told), _holds(told)),
        advice=None,
        events=(),
    )
    match told.verdict:
        case Verdict.APPLY:
            now = _remember(now, review, told, APPLIED, answered.plan)
            now = replace(now, events=(Event("Replanned", told.reason),))
            return _rest_on(view, now, answered, told)
        case Verdict.PROPOSE:
            return _advise(view, now, answered, review, told)
        case Verdict.CORRECT:
            event = Event("ModelCorrected", told.judged, is_warning=True)
            return replace(_remember(now, review, told, CORRECTED), events=(event,))
        case Verdict.KEEP if change is not None:
            return replace(now, events=(Event("PlanKept", f"{change}; {told.reason}"),))
    return now


def _drifted(change: Change | None, told: Reviewed) -> Condition:
    match told.verdict:
        case Verdict.APPLY:
            return Condition(DRIFTED, False, "Replanned", told.reason)
        case Verdict.PROPOSE:
            return Condition(DRIFTED, True, PROPOSED, told.reason)
        case Verdict.CORRECT:
            return Condition(DRIFTED, change is not None, CORRECTED, told.judged)
    if change is None:
        return Condition(DRIFTED, False, "AsPlanned", told.reason)
    # It is known and lived with: nothing is left to do about it.
    return Condition(DRIFTED, False, "Kept", f"{change}; {told.reason}")


def _holds(told: Reviewed) -> Condition:
    if told.holds is None:
        return Condition(HOLDS, None, "TooFewAnswers", told.judged)
    return Condition(HOLDS, told.holds, "Holds" if told.holds else "Wrong", told.judged)


def _rest_on(view: "DeploymentView", now: Turn, answered: PlanOutcome, told: Reviewed) -> Turn:
    """The answer's plan counts from now on, and with it what it rests on."""
    if answered.basis is None:
        raise ValueError("answered: says not what was planned for")
    basis = answered.basis.model_copy(update={"correction": told.correction})
    digest = inputs(view.deployment, view.inventory, basis)
    plan = {**(answered.plan or {}), "inputs": digest}
    outcome = PlanOutcome(digest, view.inventory.numbers, basis, plan=plan)
    return replace(now, basis=basis, outcome=outcome)


def _advise(
    view: "DeploymentView", now: Turn, answered: PlanOutcome, review: Review, told: Reviewed
) -> Turn:
    """Told once, however often it is found again."""
    plan = answered.plan or {}
    last = now.plans[0] if now.plans else {}
    if (last.get("verdict"), last.get("pools")) != (PROPOSED, plan.get("pools")):
        now = _remember(now, review, told, PROPOSED, plan)
        now = replace(now, events=(Event("PlanProposed", told.reason),))
    if view.deployment.spec.planning.mode is Mode.ADVISORY:
        # All plans are advice there: this one takes the place of the last.
        return _rest_on(view, now, answered, told)
    return replace(now, advice=plan)


def _remember(
    now: Turn, review: Review, told: Reviewed, verdict: str, plan: Manifest | None = None
) -> Turn:
    """With an entry in what came of the last looks; corrections in a row are one."""
    entry: Manifest = {
        "at": timestamp(review.at_s),
        "verdict": verdict,
        "reason": told.judged if verdict == CORRECTED else told.reason,
    }
    if plan is not None:
        entry["pools"] = plan["pools"]
    if verdict == APPLIED:
        left = instances(review.pools)
        entry["left"] = [pool.model_dump(mode="json", exclude_none=True) for pool in left]
    plans = now.plans
    if verdict == CORRECTED and plans and plans[0]["verdict"] == CORRECTED:
        plans = plans[1:]
    return replace(now, plans=(entry, *plans)[:_MOST_PLANS])
