"""Reconcile of an LLMDeployment: plan, pools, gateway, status. Pure.

Called by the controller. What is hard: roles have to change together, since prefill and decode of
unlike revisions do not work together. This reconcile says how many instances of each revision every
pool keeps at the moment; the pools do it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cleave.api.deployment import LLMDeployment
from cleave.api.planning import Mode
from cleave.api.pool import InstancePool, PoolRollout, ReplicasOwner
from cleave.api.role import Role
from cleave.controller import conditions, placing, repurposing, scaling, told, wanted
from cleave.controller.actions import (
    Action,
    Apply,
    Ask,
    Delete,
    Emit,
    PlanOutcome,
    Requeue,
    SetFinalizers,
)
from cleave.controller.instances import Instance
from cleave.controller.inventory import Inventory
from cleave.controller.loop import replanning
from cleave.controller.loop.drift import Course
from cleave.controller.observed import ObservedPod
from cleave.controller.placing import Decision
from cleave.controller.repurposing import Move
from cleave.controller.rollout import Count, RoleState, RolloutLimits, Step, next_step
from cleave.controller.scaling import Demand
from cleave.controller.settings import Settings
from cleave.controller.wanted import FINALIZER, Children
from cleave.pods.budget import gateway_budget
from cleave.pods.discovery import role_binding, service_account, workers_service
from cleave.pods.gateway import gateway_deployment, gateway_service
from cleave.pods.isolation import workers_policy
from cleave.pods.labels import Manifest
from cleave.pods.pool import pools
from cleave.traffic.window import Window

_AGAIN_S = 30.0
_MAX_SKEW = 0.25


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """A deployment and what belongs to it."""

    deployment: LLMDeployment
    """With the metadata that the API server wrote; without its status."""
    inventory: Inventory
    now_s: float
    status: Manifest = field(default_factory=dict)
    """As it was written last."""
    pools: tuple[InstancePool, ...] = ()
    pool_status: Mapping[Role, Manifest] = field(default_factory=dict)
    pods: tuple[ObservedPod, ...] = ()
    """One per instance."""
    children: Children = field(default_factory=dict)
    outcome: PlanOutcome | None = None
    """The planner's last answer."""
    instances: Mapping[str, Instance] | None = None
    """What the gateways know, by pod; None: none has answered."""
    asked: PlanOutcome | None = None
    """The question that the planner works on."""
    traffic: Window | None = None
    """Of about the last minute; None: not known."""
    windows: tuple[Window, ...] = ()
    """The same and what was before, piece by piece, oldest first."""
    course: Course = Course()  # noqa: RUF009 - a frozen value
    """How it compares with what was planned for, as far as that is known."""
    demand: Demand | None = None
    """What instances follow; None: not known, or nobody asked for it."""
    fault: str = ""
    """Why what was wanted last could not be made."""
    settings: Settings = Settings()  # noqa: RUF009 - a frozen value

    def alive(self, role: Role) -> list[ObservedPod]:
        """The instances of a role that are neither going nor over."""
        return [pod for pod in self.pods if pod.role is role and not (pod.deleting or pod.is_over)]


def reconcile(view: DeploymentView) -> list[Action]:
    """What to do next; nothing when all is as it is wanted."""
    deployment = view.deployment
    if deployment.metadata.deletion_timestamp is not None:
        return list(_deleting(view))
    actions: list[Action] = []
    if FINALIZER not in deployment.metadata.finalizers:
        actions.append(_finalizers(deployment, (*deployment.metadata.finalizers, FINALIZER)))
    there = {pool.spec.role: pool for pool in view.pools}
    turn = replanning.turn(view)
    decision = placing.decide(
        deployment,
        view.status,
        view.inventory,
        turn.outcome,
        is_limited=_is_limited(view),
        basis=turn.basis,
    )
    # Without a placement what runs stays; how many of it there are may change all the same.
    asked = list(view.pools)
    if decision.placement is not None:
        asked = pools(deployment, decision.placement, view.inventory.machines)
    asked = _scaled(view, decision, asked)
    changes = decision.placement is not None or asked != list(view.pools)
    goals: Mapping[Role, InstancePool] = there
    if changes:
        goals = {pool.spec.role: _of_owner(pool, there.get(pool.spec.role)) for pool in asked}
    work: list[Action] = list(wanted.changed(_fixed(view), deployment, view.children))
    if changes:
        work += _moved(view, goals)
        if decision.plan == view.status.get("plan"):
            work += _told_scaled(view, goals)
    is_applied = not work and _is_of_spec(view, decision)
    if deployment.spec.paused:
        # What there would be to do waits, and only says whether anything does.
        kept = placing.kept(view.status)
        return [*actions, *told.report(view, kept, there, turn, is_applied=is_applied)]
    if (question := decision.question or turn.question) is not None:
        actions.append(Ask(question))
    # The status comes first: it is written even where the rest fails.
    actions += told.report(view, decision, goals, turn, is_applied=is_applied)
    return actions + work


def _is_of_spec(view: DeploymentView, decision: Decision) -> bool:
    """Whether the placement in force answers the present spec.

    Not while it is planned, nor when there is no plan for it. Advisory applies no plan: there the
    pools are compared with what the plan in force makes of the spec.
    """
    if decision.placement is not None:
        return True
    deployment, there = view.deployment, {pool.spec.role: pool for pool in view.pools}
    if deployment.spec.planning.mode is not Mode.ADVISORY or decision.plan is None:
        return False
    try:
        placement = placing.placed(decision.plan)
    except ValueError:
        return False
    made = {pool.spec.role: pool for pool in pools(deployment, placement, view.inventory.machines)}
    return made.keys() == there.keys() and all(
        _counted(pool, there[role].spec.replicas, there[role].spec.owner).spec == there[role].spec
        for role, pool in made.items()
    )


def _scaled(
    view: DeploymentView, decision: Decision, asked: Sequence[InstancePool]
) -> list[InstancePool]:
    """The pools with as many instances as there should be now."""
    if not scaling.watches(view.deployment) or decision.plan is None:
        return list(asked)
    if view.deployment.spec.paused:
        # What traffic asks for meanwhile is no change that waits.
        counts: scaling.Counts = {pool.spec.role: pool.spec.replicas for pool in view.pools}
    else:
        counts = scaling.find_counts(view, decision.plan)
    return [
        _counted(pool, counts.get(pool.spec.role, pool.spec.replicas), pool.spec.owner)
        for pool in asked
    ]


def _told_scaled(view: DeploymentView, goals: Mapping[Role, InstancePool]) -> Iterator[Emit]:
    """How many there will be, where that changes and the plan does not."""
    there = {pool.spec.role: pool.spec.replicas for pool in view.pools}
    changes = [
        f"{role} {there[role]} -> {goal.spec.replicas}"
        for role, goal in goals.items()
        if role in there and there[role] != goal.spec.replicas
    ]
    if changes and scaling.watches(view.deployment):
        rate = f" at {view.demand.rate:.3g} req/s" if view.demand else ""
        target = wanted.reference(view.deployment)
        yield Emit(target, "Scaled", f"instances: {', '.join(changes)}{rate}")


def _fixed(view: DeploymentView) -> list[Manifest]:
    """What a deployment has whatever its plan."""
    deployment, settings = view.deployment, view.settings
    return [
        service_account(deployment),
        role_binding(deployment, settings.discovery_role),
        workers_service(deployment),
        gateway_service(deployment),
        gateway_deployment(deployment, image_prefix=settings.image_prefix),
        gateway_budget(deployment),
        *([workers_policy(deployment, settings.namespace)] if settings.isolates else ()),
    ]


def _moved(view: DeploymentView, goals: Mapping[Role, InstancePool]) -> Iterator[Action]:
    """Pools as they should be at this moment; those of dropped roles go once they are empty."""
    there = {pool.spec.role: pool for pool in view.pools}
    dropped = {role: _emptied(pool) for role, pool in there.items() if role not in goals}
    asked = {**goals, **dropped}
    moves = repurposing.choose(view.pods, asked, there)
    # What moves is where it belongs: it neither starts nor ends.
    settled = replace(view, pods=repurposing.after(view.pods, moves))
    steps = {**_steps(settled, goals, dropped), **_held(view, moves, there, dropped)}
    for role, goal in asked.items():
        if role in dropped and not any(pod.role is role for pod in view.pods):
            if there[role].metadata.deletion_timestamp is None:
                yield Delete(wanted.reference(there[role]))
        else:
            yield from _set_back(view, goal, there.get(role))
            yield from _applied(goal, steps.get(role), there.get(role), view.deployment)
    yield from repurposing.moved(moves, there)
    leaving = {move.pod.name for move in moves}
    staying = (pod for pod in view.pods if pod.name not in leaving)
    yield from repurposing.corrected(staying, view.instances or {}, there)


def _held(
    view: DeploymentView,
    moves: Sequence[Move],
    there: Mapping[Role, InstancePool],
    dropped: Mapping[Role, InstancePool],
) -> Mapping[Role, Step]:
    """Pools that make nothing, or let nothing go, before instances have moved.

    One that is not there yet would fill itself; one that the plan has dropped would empty itself
    even where an instance cannot move.
    """
    receivers = {move.role for move in moves} - there.keys()
    donors = {move.pod.role for move in moves} & dropped.keys()
    count = Counter(pod.role for pod in view.pods if not (pod.deleting or pod.is_over))
    return {role: Step(new=count[role], old=0) for role in receivers | donors}


def _set_back(
    view: DeploymentView, goal: InstancePool, there: InstancePool | None
) -> Iterator[Emit]:
    """Tell whoever has scaled a pool that belongs to the plan, while the plan has not changed."""
    planned = {
        pool["role"]: pool["replicas"] for pool in view.status.get("plan", {}).get("pools", ())
    }
    count = goal.spec.replicas
    if scaling.watches(view.deployment) or there is None or there.spec.replicas == count:
        return
    if planned.get(str(goal.spec.role)) != count:
        return
    text = (
        f"replicas: {there.spec.replicas} set back to {count}, the plan's number; "
        f"spec.owner: Manual or Autoscaler keeps what you set"
    )
    yield Emit(wanted.reference(there), "ReplicasSetBack", text, is_warning=True)


def _emptied(pool: InstancePool) -> InstancePool:
    """A pool that the plan has dropped."""
    return _counted(pool, 0, ReplicasOwner.PLAN)


def _of_owner(goal: InstancePool, there: InstancePool | None) -> InstancePool:
    """The goal with the number of instances that its owner wants, where that is not the plan."""
    if there is None or there.spec.owner is ReplicasOwner.PLAN:
        return goal
    return _counted(goal, there.spec.replicas, there.spec.owner)


def _counted(pool: InstancePool, replicas: int, owner: ReplicasOwner) -> InstancePool:
    spec = pool.spec.model_copy(update={"replicas": replicas, "owner": owner})
    return pool.model_copy(update={"spec": spec})


def _steps(
    view: DeploymentView,
    goals: Mapping[Role, InstancePool],
    dropped: Mapping[Role, InstancePool],
) -> Mapping[Role, Step]:
    """What to keep of each revision now; nothing where nothing has to be replaced."""
    roles = {role: _state(view, role, goal) for role, goal in {**goals, **dropped}.items()}
    is_rolling = any(state.old for state in roles.values())
    if not is_rolling and not any(roles[role].new for role in dropped):
        return {}
    stated = view.deployment.spec.rollout
    limits = RolloutLimits(stated.max_surge, stated.max_unavailable, _MAX_SKEW)
    return next_step(roles, limits)


def _state(view: DeploymentView, role: Role, goal: InstancePool) -> RoleState:
    """The instances of a role by revision."""
    pods = [pod for pod in view.pods if pod.role is role and not pod.is_over]
    there = [pod for pod in pods if not pod.deleting]
    revision = goal.spec.revision
    new = [pod for pod in there if pod.revision == revision]
    older: dict[str, Count] = {}
    for pod in there:
        if pod.revision != revision:
            known = older.get(pod.revision, Count(0, 0))
            older[pod.revision] = Count(known.total + 1, known.ready + pod.ready)
    return RoleState(
        replicas=goal.spec.replicas,
        old=sum(count.total for count in older.values()),
        old_ready=sum(count.ready for count in older.values()),
        new=len(new),
        new_ready=sum(pod.ready for pod in new),
        leaving=sum(pod.deleting for pod in pods),
        older=older,
    )


def _applied(
    goal: InstancePool, step: Step | None, there: InstancePool | None, owner: LLMDeployment
) -> Iterator[Apply]:
    """Apply a pool, unless it is so already."""
    rollout = PoolRollout(new=step.new, old=step.old, older=dict(step.older)) if step else None
    spec = goal.spec.model_copy(update={"rollout": rollout})
    if there is not None and there.spec == spec:
        return
    if there is not None and there.metadata.deletion_timestamp is not None:
        return
    manifest: Manifest = {
        "apiVersion": goal.api_version,
        "kind": goal.kind,
        "metadata": {
            "name": goal.name,
            "namespace": goal.namespace,
            "labels": goal.metadata.labels,
            # Set from the start, so that none of its pods is ever without.
            "finalizers": [FINALIZER],
        },
        "spec": spec.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        | {"replicas": spec.replicas, "owner": str(spec.owner)},
    }
    if there is not None and there.spec.owner is not ReplicasOwner.PLAN:
        # Whoever owns the number may have changed it since it was seen.
        manifest["metadata"]["resourceVersion"] = there.metadata.resource_version
    yield Apply(wanted.owned(manifest, owner), is_new=there is None)


def _deleting(view: DeploymentView) -> Iterator[Action]:
    """Pools first: their pods drain while the gateway still carries what runs."""
    deployment = view.deployment
    if FINALIZER not in deployment.metadata.finalizers:
        return
    for pool in view.pools:
        if pool.metadata.deletion_timestamp is None:
            yield Delete(wanted.reference(pool))
    if not view.pools:
        kept = tuple(name for name in deployment.metadata.finalizers if name != FINALIZER)
        yield _finalizers(deployment, kept)
    else:
        yield Requeue(_AGAIN_S)


def _is_limited(view: DeploymentView) -> bool:
    return any(
        conditions.holds(status.get("conditions", []), "ScalingLimited")
        for status in view.pool_status.values()
    )


def _finalizers(deployment: LLMDeployment, names: tuple[str, ...]) -> SetFinalizers:
    version = deployment.metadata.resource_version or ""
    return SetFinalizers(wanted.reference(deployment), names, version)
