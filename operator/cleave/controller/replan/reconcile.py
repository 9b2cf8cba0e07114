"""Decides when to review the running plan, and takes up the planner's results. Pure.

Called by the deployment's reconcile. Traffic is compared with the planned one. When it changes, and
periodically, the planner reviews the running plan (`replan.review`, in its process), and its
verdict is applied here, once. What is hard: only recent traffic is kept in memory; everything else
is in the status, so that a restart neither loses a plan nor makes one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from cleave.api.deployment import LLMDeployment
from cleave.api.planning import Mode, Replanning
from cleave.api.pool import ReplicasOwner
from cleave.api.replan_status import PastPlan, PlanBasis
from cleave.controller.cluster import conditions
from cleave.controller.cluster.actions import PlanOutcome, Review
from cleave.controller.cluster.conditions import Condition
from cleave.controller.cluster.objects import seconds, timestamp
from cleave.controller.deployment.placement import inputs, placed
from cleave.controller.replan import drift
from cleave.controller.replan import inputs as bases
from cleave.controller.replan.drift import Course, find_settle_s, find_start, list_recent
from cleave.controller.replan.outcome import (
    APPLIED,
    CORRECTED,
    DRIFTED,
    HOLDS,
    PROPOSED,
    Event,
    Turn,
)
from cleave.controller.replan.verdict import follow
from cleave.manifests.labels import Manifest
from cleave.planner import deployment_checks
from cleave.planner.placement import to_planned
from cleave.planner.plan import PlannedPool
from cleave.planner.replan.model_check import FEWEST, SETTLE_S
from cleave.planner.replan.revision import Left, Terms
from cleave.traffic.drift_detector import Change
from cleave.traffic.refit import RefitError, refit
from cleave.traffic.window import Window, list_settled

if TYPE_CHECKING:
    from cleave.controller.deployment.reconcile import DeploymentView

_SOON = 5
"""After a model correction or a change of traffic the next review comes after this fraction of the
interval. Windows this soon after a change still mix both sides of it (at most a minute)."""
_HORIZON = 12
"""Intervals for which traffic is assumed to stay as it is: an hour with the default interval."""
_NOT_COMPARED = "nothing was compared yet"


def watches(deployment: LLMDeployment) -> bool:
    """Whether the gateways' counters are needed for replanning."""
    return deployment.spec.planning.replan.mode is not Replanning.OFF


def turn(view: "DeploymentView") -> Turn:
    """Return the outcome of replanning from observed traffic and the planner's last result.

    1. Read what the status records. 2. Apply a new result. 3. Else report a change of traffic, and
    request a review when one is due.
    """
    deployment, status, inventory = view.deployment, view.status, view.inventory
    recorded = Turn(
        basis=bases.standing(deployment, status, inventory),
        outcome=view.outcome,
        correction=bases.corrected(deployment, status, inventory),
        plans=tuple(status.get("plans", ())),
    )
    if not _is_looked_at(deployment):
        return recorded
    recorded = replace(recorded, conditions=_said(status), prediction=status.get("prediction"))
    if any(each.type == DRIFTED and each.reason == PROPOSED for each in recorded.conditions):
        recorded = replace(recorded, advice=status.get("advice"))
    if deployment.spec.paused:
        return recorded
    change = view.course.change
    finished = _answered(view)
    if finished is not None:
        return follow(view, recorded, change, finished)
    return replace(
        _noticed(_unanswered(view, recorded), change, _told_s(status)),
        question=_due(view, recorded, change),
    )


def follow_course(
    state: Course, deployment: LLMDeployment, status: Manifest, windows: Iterable[Window]
) -> Course:
    """Compare new windows with the traffic that the plan was made for."""
    planned_for = bases.planned_for(deployment, status)
    return drift.follow(state, planned_for, windows, _settled_s(status))


def is_urgent(state: Course, deployment: LLMDeployment, status: Manifest) -> bool:
    """Whether a change was detected that no review has covered yet."""
    change = state.change if _is_looked_at(deployment) else None
    return change is not None and _came_after(change, _told_s(status))


def _is_looked_at(deployment: LLMDeployment) -> bool:
    """Whether the running plan is reviewed.

    A manual placement is reviewed only in Advisory mode. A model that the planner does not know
    cannot be reviewed.
    """
    spec = deployment.spec
    is_by_hand = spec.placement is not None and spec.planning.mode is not Mode.ADVISORY
    if is_by_hand or not watches(deployment):
        return False
    return deployment_checks.unknown_model(deployment, reads_files=False) is None


def _said(status: Manifest) -> tuple[Condition, ...]:
    """The present conditions stay until there is a new result."""
    recorded = {each.type: each for each in conditions.read(status)}
    return tuple(
        recorded.get(kind, Condition(kind, None, "NotCompared", _NOT_COMPARED))
        for kind in (DRIFTED, HOLDS)
    )


def _noticed(recorded: Turn, change: Change | None, reviewed_s: float) -> Turn:
    """Report a detected change at once; the review takes a moment longer."""
    drifted, *rest = recorded.conditions
    if change is None or drifted.status or not _came_after(change, reviewed_s):
        return recorded
    condition = Condition(DRIFTED, True, "TrafficChanged", f"{change}; looking for a better plan")
    event = Event(DRIFTED, f"traffic is not what was planned for: {change}")
    return replace(recorded, conditions=(condition, *rest), events=(event,))


def _unanswered(view: "DeploymentView", recorded: Turn) -> Turn:
    """Report a review that failed; it is requested again when due."""
    outcome = view.outcome
    if outcome is None or outcome.review is None or not outcome.faults:
        return recorded
    drifted, _ = recorded.conditions
    failed = Condition(HOLDS, None, "NotCompared", "; ".join(outcome.faults))
    return replace(recorded, conditions=(drifted, failed))


def _settled_s(status: Manifest) -> float | None:
    """Time since which the fleet is as desired; None: it is not."""
    for each in status.get("conditions", ()):
        if each["type"] == "Progressing" and each["status"] == "False":
            return seconds(each["lastTransitionTime"])
    return None


def _came_after(change: Change, at_s: float) -> bool:
    """Compare in whole seconds, as the status has no fractions."""
    return int(change.at_s) > at_s


def _told_s(status: Manifest) -> float:
    """Time of the last review."""
    return seconds(status.get("prediction", {}).get("at")) or 0.0


def _answered(view: "DeploymentView") -> PlanOutcome | None:
    """Return a finished review that is still valid and was not applied yet; else None."""
    outcome = view.outcome
    if outcome is None or outcome.review is None or outcome.reviewed is None:
        return None
    if outcome.inputs != inputs(view.deployment, view.inventory, outcome.basis):
        return None
    reviewed_at = view.status.get("prediction", {}).get("at")
    return None if reviewed_at == timestamp(outcome.review.at_s) else outcome


def _due(view: "DeploymentView", recorded: Turn, change: Change | None) -> PlanOutcome | None:
    """Return the request for a review if one is due and enough traffic was observed."""
    settled_s, current_pools = _settled_s(view.status), _running(view)
    if view.asked is not None or settled_s is None or not current_pools:
        return None
    if not _is_time(view, recorded, change, settled_s):
        return None
    since_s = find_start(view.windows, change, settled_s)
    settings = _terms(view)
    settle_s = find_settle_s(view.windows, change, since_s, settings.settle_s)
    settings = replace(settings, settle_s=settle_s)
    # The model check skips the windows of `settle_s` at their beginning.
    recent = list_recent(view.windows, since_s, settings.cooldown_s, settings.settle_s)
    if change is None and not _can_be_judged(recent, settings):
        # Traffic is as planned: wait until the model can be checked as well.
        return None
    try:
        workload = refit(recent)
    except RefitError:
        return None
    of = bases.traffic_digest(view.deployment)
    fitted = PlanBasis(workload=workload, correction=recorded.correction, of=of)
    algorithm = str(view.status.get("plan", {}).get("algorithm", ""))
    past_plans = tuple(_left(recorded.plans))
    review = Review(view.now_s, current_pools, algorithm, recent, settings, past_plans)
    return PlanOutcome(
        inputs(view.deployment, view.inventory, fitted),
        view.inventory.numbers,
        fitted,
        review,
        bases.model_digest(view.deployment, view.inventory),
    )


def _is_time(
    view: "DeploymentView", recorded: Turn, change: Change | None, settled_s: float
) -> bool:
    requested_s = view.outcome.review.at_s if view.outcome and view.outcome.review else 0.0
    last_s = max(requested_s, _told_s(view.status), settled_s)
    if change is not None and _came_after(change, last_s):
        return True
    is_corrected = any(each.reason == CORRECTED for each in recorded.conditions)
    interval_s = view.deployment.spec.planning.replan.interval_s
    is_soon = is_corrected or view.course.is_fresh(view.now_s, interval_s)
    overdue_s = view.now_s - last_s - interval_s / (_SOON if is_soon else 1)
    return overdue_s >= 0 and not view.course.puts_off(overdue_s, interval_s)


def _can_be_judged(windows: Sequence[Window], settings: Terms) -> bool:
    settled = list_settled(windows, settings.settle_s)
    return sum(min(each.ttft.num, each.tpot.num) for each in settled) >= FEWEST


def _running(view: "DeploymentView") -> tuple[PlannedPool, ...]:
    """The plan in force, with the present replicas of its pools."""
    counts = {pool.spec.role: pool.spec.replicas for pool in view.pools}
    try:
        planned = placed(view.status.get("plan", {})).pools
    except ValueError:
        return ()
    current = (replace(pool, replicas=counts.get(pool.role, 0)) for pool in planned)
    return tuple(pool for pool in current if pool.replicas)


def _terms(view: "DeploymentView") -> Terms:
    planning = view.deployment.spec.planning
    replan = planning.replan
    is_scaled_by_others = any(pool.spec.owner is not ReplicasOwner.PLAN for pool in view.pools)
    return Terms(
        is_advisory=is_scaled_by_others
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
    """Shortest start of the running instances; `ready_s` may be that of a later recovery."""
    starts = (pod.ready_s - pod.created_s for pod in view.pods if pod.ready and pod.ready_s)
    return min(starts, default=Terms().start_s)


def _left(plans: Iterable[Manifest]) -> Iterator[Left]:
    for each in plans:
        past = PastPlan.model_validate(each, by_alias=True)
        if past.verdict == APPLIED:
            yield Left(tuple(map(to_planned, past.left)), past.at.timestamp())
