"""Builds the status of an InstancePool. Pure; called by the pool's reconcile."""

from collections.abc import Iterator

from cleave.api.pool import InstancePoolStatus
from cleave.controller.cluster import apply, conditions, objects
from cleave.controller.cluster.actions import Action, PatchStatus
from cleave.controller.cluster.conditions import ConditionState
from cleave.controller.pool.unschedulable import CapacityProbe, SchedulingLimit
from cleave.controller.rollout.planner import RolloutStep
from cleave.controller.views import PoolInstances, PoolView
from cleave.manifests.labels import COMPONENT, NODE_RANK, POOL, WORKER, Manifest


def report(
    view: PoolView, fleet: PoolInstances, target: RolloutStep, limited: SchedulingLimit
) -> Iterator[Action]:
    """Yield a write of the new status and its Events; nothing when the status is up to date."""
    pool, before = view.pool, view.status.get("conditions", [])
    now = _build_conditions(view, fleet, target, limited)
    status: Manifest = {
        "observedGeneration": pool.metadata.generation or 0,
        "replicas": len(fleet.all),
        "ready": fleet.num_ready,
        "serving": fleet.num_ready if view.serving is None else view.serving,
        "updated": len(fleet.new),
        # One pod per instance: further pods of an instance on several nodes do not count.
        "selector": f"{POOL}={pool.name},{COMPONENT}={WORKER},!{NODE_RANK}",
        "conditions": conditions.merge(before, now, pool.metadata.generation, view.now_s),
    }
    if limited.probe is not None:
        status["trial"] = _to_status(limited.probe)
    if not apply.is_same_status(InstancePoolStatus, status, view.status):
        yield PatchStatus(apply.build_reference(pool), status)
        yield from conditions.build_events(apply.build_reference(pool), before, now)


def read_probe(status: Manifest) -> CapacityProbe | None:
    """Read the last attempt to run more instances than fit from the status."""
    recorded = status.get("trial")
    if recorded is None:
        return None
    return CapacityProbe(
        schedulable=recorded["fits"],
        attempts=recorded["attempts"],
        retry_at_s=objects.parse_timestamp(recorded["againAt"]) or 0.0,
        nodes=recorded["nodes"],
        reason=recorded["reason"],
    )


def _to_status(last: CapacityProbe) -> Manifest:
    return {
        "fits": last.schedulable,
        "attempts": last.attempts,
        "againAt": objects.format_timestamp(last.retry_at_s),
        "nodes": last.nodes,
        "reason": last.reason,
    }


def _build_conditions(
    view: PoolView, fleet: PoolInstances, target: RolloutStep, limited: SchedulingLimit
) -> list[ConditionState]:
    count = view.pool.spec.replicas
    updated = sum(pod.ready for pod in fleet.new)
    message = f"{updated} of {count} instances are ready"
    ready = ConditionState("Ready", True, "Ready", message)
    if fleet.old:
        message += f"; {len(fleet.old)} of an earlier spec are left"
        ready = ConditionState("Ready", False, conditions.ROLLING_OUT, message)
    elif updated < count:
        ready = ConditionState("Ready", False, "NotReady", message)
    reason = "Unschedulable" if limited.reason else "Fits"
    is_moving = bool(fleet.old) or len(fleet.new) != target.new or target.new != count
    return [
        ready,
        ConditionState("ScalingLimited", bool(limited.reason), reason, limited.reason),
        ConditionState("Progressing", is_moving, "Changing" if is_moving else "Settled"),
        _build_degraded(view, fleet, message),
    ]


def _build_degraded(view: PoolView, fleet: PoolInstances, message: str) -> ConditionState:
    if view.fault:
        return ConditionState("Degraded", True, "Failed", view.fault)
    if stuck := next((pod for pod in fleet.all if pod.start_fault), None):
        text = f"{stuck.name} cannot start: {stuck.start_fault}"
        return ConditionState("Degraded", True, conditions.NOT_STARTING, text)
    if failing := next((pod for pod in fleet.all if pod.keeps_ending), None):
        text = f"{failing.name} was started again {failing.restarts} times"
        text += f"; the last time it ended: {failing.last_end}" if failing.last_end else ""
        return ConditionState("Degraded", True, "Restarting", text)
    if 0 < fleet.num_ready < view.pool.spec.replicas and len(fleet.all) >= view.pool.spec.replicas:
        return ConditionState("Degraded", True, "TooFew", message)
    return ConditionState("Degraded", False, "Complete", "no instance keeps failing")
