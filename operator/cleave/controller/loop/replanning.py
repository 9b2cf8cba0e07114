"""Whether plans follow traffic: what was seen, what is asked, what was answered. Pure.

Called by the deployment's reconcile. Traffic is compared with what was planned for; when it has
changed, and now and then, the planner is asked about what runs (`loop.review`, in its process), and
its verdict is taken up here, once. What is hard: nothing of it is kept in memory but what gateways
have counted of late; all else is in status, so that a restart neither loses a plan nor makes one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cleave.api.deployment import LLMDeployment
from cleave.api.observed import PastPlan, PlanBasis
from cleave.api.planning import Mode, Replanning
from cleave.api.pool import ReplicasOwner
from cleave.controller import conditions
from cleave.controller.actions import PlanOutcome, Review
from cleave.controller.conditions import Condition
from cleave.controller.loop import basis as bases
from cleave.controller.loop import drift
from cleave.controller.loop.drift import Course, find_settle_s, find_start, list_recent
from cleave.controller.loop.following import follow
from cleave.controller.loop.turn import APPLIED, CORRECTED, DRIFTED, HOLDS, PROPOSED, Event, Turn
from cleave.controller.observed import seconds, timestamp
from cleave.controller.placing import inputs, placed
from cleave.planner import checks
from cleave.planner.guard import FEWEST, SETTLE_S
from cleave.planner.placement import to_planned
from cleave.planner.plan import PlannedPool
from cleave.planner.revision import Left, Terms
from cleave.pods.labels import Manifest
from cleave.traffic.change import Change
from cleave.traffic.refit import RefitError, refit
from cleave.traffic.window import Window, list_settled

if TYPE_CHECKING:
    from cleave.controller.deployment import DeploymentView

_SOON = 5
"""A corrected model, and traffic that has just changed, are looked at again after this part of the
interval; what was seen less long after a change tells of both sides of it, where that is less than
a minute."""
_HORIZON = 12
"""Intervals for which traffic is taken to stay as it is: an hour, as the interval is by itself."""
_NOT_COMPARED = "nothing was compared yet"


def watches(deployment: LLMDeployment) -> bool:
    """Whether the gateways' counts are of use."""
    return deployment.spec.planning.replan.mode is not Replanning.OFF


def turn(view: "DeploymentView") -> Turn:
    """What follows from what was seen, and from the planner's answer to the last question."""
    deployment, status, there = view.deployment, view.status, view.inventory
    kept = Turn(
        basis=bases.standing(deployment, status, there),
        outcome=view.outcome,
        correction=bases.corrected(deployment, status, there),
        plans=tuple(status.get("plans", ())),
    )
    if not _is_looked_at(deployment):
        return kept
    kept = replace(kept, conditions=_said(status), prediction=status.get("prediction"))
    if any(each.type == DRIFTED and each.reason == PROPOSED for each in kept.conditions):
        kept = replace(kept, advice=status.get("advice"))
    if deployment.spec.paused:
        return kept
    change = view.course.change
    answered = _answered(view)
    if answered is not None:
        return follow(view, kept, change, answered)
    return replace(
        _noticed(_unanswered(view, kept), change, _told_s(status)),
        question=_due(view, kept, change),
    )


def follow_course(
    course: Course, deployment: LLMDeployment, status: Manifest, windows: Iterable[Window]
) -> Course:
    """How traffic compares with what the plan was made for; `course`: as far as that is known."""
    planned_for = bases.planned_for(deployment, status)
    return drift.follow(course, planned_for, windows, _settled_s(status))


def is_urgent(course: Course, deployment: LLMDeployment, status: Manifest) -> bool:
    """Whether there is a change that nobody has looked at yet."""
    change = course.change if _is_looked_at(deployment) else None
    return change is not None and _came_after(change, _told_s(status))


def _is_looked_at(deployment: LLMDeployment) -> bool:
    """What is stated by hand stays, and is only looked at where advice is wanted.

    Of a model that the planner does not know, it could say nothing.
    """
    spec = deployment.spec
    is_by_hand = spec.placement is not None and spec.planning.mode is not Mode.ADVISORY
    if is_by_hand or not watches(deployment):
        return False
    return checks.unknown_model(deployment, reads_files=False) is None


def _said(status: Manifest) -> tuple[Condition, ...]:
    """What was said stays said until there is news."""
    before = {each.type: each for each in conditions.read(status)}
    return tuple(
        before.get(kind, Condition(kind, None, "NotCompared", _NOT_COMPARED))
        for kind in (DRIFTED, HOLDS)
    )


def _noticed(kept: Turn, change: Change | None, told_s: float) -> Turn:
    """A change is told when it is first seen; what to do about it takes a moment longer."""
    drifted, *others = kept.conditions
    if change is None or drifted.status or not _came_after(change, told_s):
        return kept
    now = Condition(DRIFTED, True, "TrafficChanged", f"{change}; a plan is looked for")
    event = Event(DRIFTED, f"traffic is not what was planned for: {change}")
    return replace(kept, conditions=(now, *others), events=(event,))


def _unanswered(view: "DeploymentView", kept: Turn) -> Turn:
    """A look that the planner could not take changes nothing; it is taken again."""
    outcome = view.outcome
    if outcome is None or outcome.review is None or not outcome.faults:
        return kept
    drifted, _ = kept.conditions
    failed = Condition(HOLDS, None, "NotCompared", "; ".join(outcome.faults))
    return replace(kept, conditions=(drifted, failed))


def _settled_s(status: Manifest) -> float | None:
    """Since when the fleet is as it was wanted; None: it is not."""
    for each in status.get("conditions", ()):
        if each["type"] == "Progressing" and each["status"] == "False":
            return seconds(each["lastTransitionTime"])
    return None


def _came_after(change: Change, at_s: float) -> bool:
    """Status knows whole seconds only."""
    return int(change.at_s) > at_s


def _told_s(status: Manifest) -> float:
    """When what runs was looked at last."""
    return seconds(status.get("prediction", {}).get("at")) or 0.0


def _answered(view: "DeploymentView") -> PlanOutcome | None:
    """The answer to a review that still speaks of this deployment and has not been taken up."""
    outcome = view.outcome
    if outcome is None or outcome.review is None or outcome.reviewed is None:
        return None
    if outcome.inputs != inputs(view.deployment, view.inventory, outcome.basis):
        return None
    told = view.status.get("prediction", {}).get("at")
    return None if told == timestamp(outcome.review.at_s) else outcome


def _due(view: "DeploymentView", kept: Turn, change: Change | None) -> PlanOutcome | None:
    """The question about what runs, if it is time for it and enough was seen."""
    settled_s, running = _settled_s(view.status), _running(view)
    if view.asked is not None or settled_s is None or not running:
        return None
    if not _is_time(view, kept, change, settled_s):
        return None
    since_s = find_start(view.windows, change, settled_s)
    terms = _terms(view)
    settle_s = find_settle_s(view.windows, change, since_s, terms.settle_s)
    terms = replace(terms, settle_s=settle_s)
    # The guard leaves the first ones out.
    recent = list_recent(view.windows, since_s, terms.cooldown_s, terms.settle_s)
    if change is None and not _can_be_judged(recent, terms):
        # What is as planned can wait until it is known whether the model is right.
        return None
    try:
        workload = refit(recent)
    except RefitError:
        return None
    of = bases.traffic_digest(view.deployment)
    basis = PlanBasis(workload=workload, correction=kept.correction, of=of)
    algorithm = str(view.status.get("plan", {}).get("algorithm", ""))
    left = tuple(_left(kept.plans))
    review = Review(view.now_s, running, algorithm, recent, terms, left)
    return PlanOutcome(
        inputs(view.deployment, view.inventory, basis),
        view.inventory.numbers,
        basis,
        review,
        bases.model_digest(view.deployment, view.inventory),
    )


def _is_time(view: "DeploymentView", kept: Turn, change: Change | None, settled_s: float) -> bool:
    asked_s = view.outcome.review.at_s if view.outcome and view.outcome.review else 0.0
    last_s = max(asked_s, _told_s(view.status), settled_s)
    if change is not None and _came_after(change, last_s):
        return True
    is_corrected = any(each.reason == CORRECTED for each in kept.conditions)
    interval_s = view.deployment.spec.planning.replan.interval_s
    is_soon = is_corrected or view.course.is_fresh(view.now_s, interval_s)
    late_s = view.now_s - last_s - interval_s / (_SOON if is_soon else 1)
    return late_s >= 0 and not view.course.puts_off(late_s, interval_s)


def _can_be_judged(windows: Sequence[Window], terms: Terms) -> bool:
    settled = list_settled(windows, terms.settle_s)
    return sum(min(each.ttft.num, each.tpot.num) for each in settled) >= FEWEST


def _running(view: "DeploymentView") -> tuple[PlannedPool, ...]:
    """The plan that runs, with as many instances as its pools have now."""
    counts = {pool.spec.role: pool.spec.replicas for pool in view.pools}
    try:
        planned = placed(view.status.get("plan", {})).pools
    except ValueError:
        return ()
    now = (replace(pool, replicas=counts.get(pool.role, 0)) for pool in planned)
    return tuple(pool for pool in now if pool.replicas)


def _terms(view: "DeploymentView") -> Terms:
    planning = view.deployment.spec.planning
    replan = planning.replan
    is_others = any(pool.spec.owner is not ReplicasOwner.PLAN for pool in view.pools)
    return Terms(
        is_advisory=is_others
        or planning.mode is Mode.ADVISORY
        or replan.mode is Replanning.ADVISORY,
        min_gain=replan.min_gain,
        threshold=replan.drift_threshold,
        horizon_s=float(_HORIZON * replan.interval_s),
        settle_s=min(SETTLE_S, replan.interval_s / _SOON),
        start_s=_start_s(view),
        cooldown_s=float(replan.interval_s),
    )


def _start_s(view: "DeploymentView") -> float:
    """How long the quickest of those that run took to start; one may have been unready since."""
    took = (pod.ready_s - pod.created_s for pod in view.pods if pod.ready and pod.ready_s)
    return min(took, default=Terms().start_s)


def _left(plans: Iterable[Manifest]) -> Iterator[Left]:
    for each in plans:
        past = PastPlan.model_validate(each, by_alias=True)
        if past.verdict == APPLIED:
            yield Left(tuple(map(to_planned, past.left)), past.at.timestamp())
