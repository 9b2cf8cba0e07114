"""Builds the status of an InstancePool. Pure; called by the pool's reconcile."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cleave.api.pool import InstancePoolStatus
from cleave.controller.cluster import apply, conditions, objects
from cleave.controller.cluster.actions import Action, PatchStatus
from cleave.controller.cluster.conditions import Condition
from cleave.controller.pool.unschedulable import Limit, Trial
from cleave.controller.rollout.planner import Step
from cleave.manifests.labels import COMPONENT, POOL, WORKER, Manifest

if TYPE_CHECKING:
    from cleave.controller.pool.reconcile import Fleet, PoolView

_RESTARTS_TO_TELL = 3


def report(view: "PoolView", fleet: "Fleet", target: Step, limited: Limit) -> Iterator[Action]:
    """Yield a write of the new status and its Events; nothing when the status is up to date."""
    pool, before = view.pool, view.status.get("conditions", [])
    now = _conditions(view, fleet, target, limited)
    status: Manifest = {
        "observedGeneration": pool.metadata.generation or 0,
        "replicas": len(fleet.all),
        "ready": fleet.ready,
        "serving": fleet.ready if view.serving is None else view.serving,
        "updated": len(fleet.new),
        # One pod per instance: further pods of an instance on several nodes do not count.
        "selector": f"{POOL}={pool.name},{COMPONENT}={WORKER}",
        "conditions": conditions.settled(before, now, pool.metadata.generation, view.now_s),
    }
    if limited.trial is not None:
        status["trial"] = _written(limited.trial)
    if not apply.same(InstancePoolStatus, status, view.status):
        yield PatchStatus(apply.reference(pool), status)
        yield from conditions.told(apply.reference(pool), before, now)


def trial(status: Manifest) -> Trial | None:
    """Read the last attempt to have more instances than fit from the status."""
    recorded = status.get("trial")
    if recorded is None:
        return None
    return Trial(
        fits=recorded["fits"],
        attempts=recorded["attempts"],
        again_s=objects.seconds(recorded["againAt"]) or 0.0,
        nodes=recorded["nodes"],
        reason=recorded["reason"],
    )


def _written(last: Trial) -> Manifest:
    return {
        "fits": last.fits,
        "attempts": last.attempts,
        "againAt": objects.timestamp(last.again_s),
        "nodes": last.nodes,
        "reason": last.reason,
    }


def _conditions(view: "PoolView", fleet: "Fleet", target: Step, limited: Limit) -> list[Condition]:
    count = view.pool.spec.replicas
    updated = sum(pod.ready for pod in fleet.new)
    message = f"{updated} of {count} instances are ready"
    ready = Condition("Ready", True, "Ready", message)
    if fleet.old:
        message += f"; {len(fleet.old)} of an earlier spec are left"
        ready = Condition("Ready", False, conditions.ROLLING_OUT, message)
    elif updated < count:
        ready = Condition("Ready", False, "NotReady", message)
    is_moving = bool(fleet.old) or len(fleet.new) != target.new or target.new != count
    return [
        ready,
        Condition(
            "ScalingLimited",
            bool(limited.reason),
            "Unschedulable" if limited.reason else "Fits",
            limited.reason,
        ),
        Condition("Progressing", is_moving, "Changing" if is_moving else "Settled"),
        _degraded(view, fleet, message),
    ]


def _degraded(view: "PoolView", fleet: "Fleet", message: str) -> Condition:
    if view.fault:
        return Condition("Degraded", True, "Failed", view.fault)
    failing = next((pod for pod in fleet.all if pod.restarts >= _RESTARTS_TO_TELL), None)
    if failing is not None and not failing.ready:
        text = f"{failing.name} was started again {failing.restarts} times"
        return Condition("Degraded", True, "Restarting", text)
    if 0 < fleet.ready < view.pool.spec.replicas and len(fleet.all) >= view.pool.spec.replicas:
        return Condition("Degraded", True, "TooFew", message)
    return Condition("Degraded", False, "Complete", "no instance keeps failing")
