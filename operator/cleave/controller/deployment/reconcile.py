"""Reconciles an LLMDeployment: plan, pools, gateway and status. Pure.

Called by the controller. Roles change together, since prefill and decode instances of different
revisions cannot work together. This reconcile decides how many instances of each revision every
pool keeps at the moment; the pools' reconciles carry it out.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from cleave.api.deployment import LLMDeployment
from cleave.api.loaded_weights import LoadedWeights
from cleave.api.plan import SelectedPlan
from cleave.api.planning import PlanningMode
from cleave.api.pool import InstancePool, PoolRollout, ReplicasOwner
from cleave.api.role import Role
from cleave.controller.cluster import apply, conditions
from cleave.controller.cluster.actions import Action, Apply, Delete, Emit, RequestPlan, Requeue
from cleave.controller.cluster.apply import FINALIZER
from cleave.controller.deployment import adapters, lending, placement, repurpose, scaling, weights
from cleave.controller.deployment import status as deployment_status
from cleave.controller.deployment.placement import PlacementDecision
from cleave.controller.deployment.repurpose import RoleChange
from cleave.controller.replan import reconcile as replan
from cleave.controller.replan.inputs import read_placement
from cleave.controller.rollout import planner as rollout_planner
from cleave.controller.rollout.planner import InstanceCount, RoleState, RolloutStep
from cleave.controller.settings import OperatorSettings
from cleave.controller.views import DeploymentView, Pools
from cleave.manifests import container, credentials, network_policies, owned_objects
from cleave.manifests.credentials import Accounts
from cleave.manifests.gateway import (
    build_gateway_deployment,
    build_gateway_service,
    get_thresholds,
)
from cleave.manifests.labels import GATEWAY, Manifest, build_object
from cleave.manifests.pool import build_pools
from cleave.rpc.plan_thresholds import PlanThresholds

_REQUEUE_S = 30.0
_MAX_SKEW = 0.25


def reconcile(view: DeploymentView) -> list[Action]:
    """Return the actions to take next; none when everything is as desired.

    1. Take up observed traffic and the planner's last result. 2. Decide the placement. 3. Derive
    the desired pools and their replicas. 4. Report the status, then write what differs.
    """
    deployment = view.deployment
    if deployment.metadata.deletion_timestamp is not None:
        return list(_delete(view))
    actions: list[Action] = [*apply.add_finalizer(deployment)]
    current, replanned = view.pools_by_role, replan.reconcile_plan(view)
    decision = placement.decide(
        view.plan_inputs,
        view.status,
        replanned.plan_result,
        is_limited=_is_limited(view),
        fitted_inputs=replanned.fitted_inputs,
    )
    # Without a placement the present pools stay; their replicas may change all the same.
    desired_pools = list(view.pools)
    if decision.placement is not None:
        desired_pools = build_pools(view.resolved, decision.placement, view.inventory.topology)
    labelled, (view, loaded) = view.pods, _apply_weights(view, desired_pools)
    desired_pools = _scale_pools(view, decision, desired_pools)
    room = None if deployment.spec.paused else view.gpu_room
    desired_pools, lent = lending.limit_pools(desired_pools, room, view.settings.device)
    changes = decision.placement is not None or desired_pools != list(view.pools)
    changes |= weights.are_rolled_out(view)
    desired: Pools = current
    if changes:
        desired = {
            pool.spec.role: _keep_owner_replicas(pool, current.get(pool.spec.role))
            for pool in desired_pools
        }
    owned = build_owned_objects(deployment, view.settings, _find_thresholds(deployment, decision))
    writes: list[Action] = [*weights.list_labels(labelled, view.pods)]
    writes += apply.build_changes(owned, deployment, view.children)
    if not view.has_accounts:
        # Nothing that has pods before them: other accounts of these names may have any rights.
        writes = [each for each in writes if _is_of_account(each)]
    elif changes:
        writes += _update_pools(view, desired)
        if decision.plan == view.status.get("plan") and lent is None:
            # What is lent has a condition with Events of its own.
            writes += _report_scaling(view, desired)
    is_applied = not writes and _matches_spec(view, decision)
    if deployment.spec.paused:
        # Pending changes wait; the status only reports whether there are any.
        decision, desired, writes = placement.retain(view.status), current, []
    elif (plan_request := decision.plan_request or replanned.plan_request) is not None:
        actions.append(RequestPlan(plan_request))
    # Status first: if a later write fails, users still see what exists.
    actions += deployment_status.report(
        view, decision, desired, replanned, lent, loaded, is_applied=is_applied
    )
    if not deployment.spec.paused:
        writes += adapters.list_orders(view)
    return actions + writes


def _is_of_account(action: Action) -> bool:
    return isinstance(action, Apply) and action.manifest["kind"] == "ServiceAccount"


def _apply_weights(
    view: DeploymentView, desired: Sequence[InstancePool]
) -> tuple[DeploymentView, LoadedWeights | None]:
    """The view in which instances that have loaded other weights than those read last are of an old
    revision, and these weights."""
    if not desired:
        return view, None
    revision = desired[0].spec.revision
    loaded = weights.update(weights.read(view.status), view, revision)
    return weights.apply(view, loaded, revision), loaded


def _matches_spec(view: DeploymentView, decision: PlacementDecision) -> bool:
    """Whether the current placement was made for the present spec.

    It is not while a plan is being made, or when there is none. In Advisory mode no plan is
    applied: there the pools are compared with those of the plan in force for the present spec.
    """
    if decision.placement is not None:
        return True
    deployment = view.deployment
    if deployment.spec.planning.mode is not PlanningMode.ADVISORY or decision.plan is None:
        return False
    try:
        planned = read_placement(decision.plan)
    except ValueError:
        return False
    pools = build_pools(view.resolved, planned, view.inventory.topology)
    expected = {pool.spec.role: pool for pool in pools}
    specs = {role: pool.spec for role, pool in view.pools_by_role.items()}
    return expected.keys() == specs.keys() and all(
        _with_replicas(pool, specs[role].replicas, specs[role].owner).spec == specs[role]
        for role, pool in expected.items()
    )


def _scale_pools(
    view: DeploymentView, decision: PlacementDecision, desired: Sequence[InstancePool]
) -> list[InstancePool]:
    """Return the pools with the replicas that traffic calls for now."""
    if not scaling.is_enabled(view.deployment) or decision.plan is None:
        return list(desired)
    if view.deployment.spec.paused:
        # While paused nothing is scaled, which does not count as a pending change.
        counts = scaling.count_engines(view.pools)
    else:
        counts = scaling.compute_counts(view, decision.plan)
    return [
        _with_replicas(pool, scaling.count_instances(pool, counts), pool.spec.owner)
        for pool in desired
    ]


def _report_scaling(view: DeploymentView, desired: Pools) -> Iterator[Emit]:
    """Yield an Event when replicas change while the plan stays."""
    current = {pool.spec.role: pool.spec.replicas for pool in view.pools}
    changes = [
        f"{role} {current[role]} -> {desired_pool.spec.replicas}"
        for role, desired_pool in desired.items()
        if role in current and current[role] != desired_pool.spec.replicas
    ]
    if changes and scaling.is_enabled(view.deployment):
        rate = f" at {view.demand.rate:.3g} req/s" if view.demand else ""
        target = apply.build_reference(view.deployment)
        yield Emit(target, "Scaled", f"instances: {', '.join(changes)}{rate}")


def _find_thresholds(deployment: LLMDeployment, decision: PlacementDecision) -> PlanThresholds:
    """Those of the plan in force; none where it cannot be read: a later version wrote it."""
    try:
        plan = SelectedPlan.read_status(decision.plan) if decision.plan else None
    except ValueError:
        plan = None
    return get_thresholds(deployment, plan)


def build_owned_objects(
    deployment: LLMDeployment, settings: OperatorSettings, thresholds: PlanThresholds
) -> list[Manifest]:
    """Objects of a deployment beside its pools. On its plan only labels of the workers' Service
    depend, the `thresholds`."""
    owned = [
        *owned_objects.build_accounts(deployment, _name_accounts(deployment)),
        owned_objects.build_workers_service(deployment, thresholds),
        build_gateway_service(deployment),
        build_gateway(deployment, settings),
        owned_objects.build_gateway_budget(deployment),
    ]
    if settings.isolation is not None:
        owned.append(network_policies.build_workers_policy(deployment, settings.isolation))
        owned.append(network_policies.build_gateway_policy(deployment, settings.isolation))
    return owned


def _name_accounts(deployment: LLMDeployment) -> Accounts:
    uid = deployment.metadata.uid or ""
    return credentials.name_accounts(deployment.namespace, deployment.name, uid)


def build_gateway(deployment: LLMDeployment, settings: OperatorSettings) -> Manifest:
    """The gateway's Deployment, as settings of the operator demand."""
    gateway = build_gateway_deployment(deployment, images=settings.images)
    template = gateway["spec"]["template"]
    spec, accounts = template["spec"], _name_accounts(deployment)
    template["spec"] = credentials.add_credentials(spec, GATEWAY, accounts, settings.account)
    if settings.has_assigned_user:
        template["spec"] = container.remove_user(template["spec"])
    return gateway


def _update_pools(view: DeploymentView, desired: Pools) -> Iterator[Action]:
    """Yield actions that bring pools to their desired state; empty pools of dropped roles go."""
    current = view.pools_by_role
    # Pools that the plan has dropped.
    dropped = {
        role: _with_replicas(pool, 0, ReplicasOwner.PLAN)
        for role, pool in current.items()
        if role not in desired
    }
    desired_or_dropped = {**desired, **dropped}
    changes = repurpose.choose_changes(view.pods, desired_or_dropped, current)
    # Count instances that change roles in their new pools: they neither start nor end.
    view_after = replace(view, pods=repurpose.apply_changes(view.pods, changes))
    steps = {
        **_plan_rollout_steps(view_after, desired, dropped),
        **_freeze_for_repurposing(view, changes, current, dropped),
    }
    for role, desired_pool in desired_or_dropped.items():
        if role in dropped and not any(pod.role is role for pod in view.pods):
            if current[role].metadata.deletion_timestamp is None:
                yield Delete(apply.build_reference(current[role]))
        else:
            pool = current.get(role)
            yield from _report_reset_replicas(view, desired_pool, pool)
            yield from _apply_pool(desired_pool, steps.get(role), pool, view.deployment)
    yield from repurpose.build_actions(changes, current)
    leaving = {change.pod.name for change in changes}
    staying = (pod for pod in view.pods if pod.name not in leaving)
    yield from repurpose.correct_roles(staying, view.instances or {}, current)


def _freeze_for_repurposing(
    view: DeploymentView,
    changes: Sequence[RoleChange],
    current: Pools,
    dropped: Pools,
) -> Mapping[Role, RolloutStep]:
    """Steps that keep pools from creating or deleting pods before instances have changed roles.

    A new receiving pool would create additional instances. A pool that the plan has dropped would
    delete its instances even if one cannot change its role.
    """
    receivers = {change.role for change in changes} - current.keys()
    donors = {change.pod.role for change in changes} & dropped.keys()
    count = Counter(pod.role for pod in view.pods if pod.is_alive)
    return {role: RolloutStep(new=count[role], old=0) for role in receivers | donors}


def _report_reset_replicas(
    view: DeploymentView, desired: InstancePool, current: InstancePool | None
) -> Iterator[Emit]:
    """Report that the replica count of a pool that the plan owns was changed and is set back."""
    count = desired.spec.replicas
    if scaling.is_enabled(view.deployment) or current is None or current.spec.replicas == count:
        return
    if lending.is_lending(view.status):
        # The plan's number is back.
        return
    try:
        pools = read_placement(view.status.get("plan", {})).pools
    except ValueError:
        return
    planned = {pool.role: pool.replicas for pool in pools}
    roles = {each.role for each in desired.spec.members} or {desired.spec.role}
    if not roles <= planned.keys() or scaling.count_instances(desired, planned) != count:
        return
    text = (
        f"replicas: {current.spec.replicas} set back to {count}, the plan's number; "
        f"spec.owner: Manual or Autoscaler keeps what you set"
    )
    yield Emit(apply.build_reference(current), "ReplicasSetBack", text, is_warning=True)


def _keep_owner_replicas(desired: InstancePool, current: InstancePool | None) -> InstancePool:
    """The desired pool with the present replicas, where the plan does not own their number."""
    if current is None or current.spec.owner is ReplicasOwner.PLAN:
        return desired
    return _with_replicas(desired, current.spec.replicas, current.spec.owner)


def _with_replicas(pool: InstancePool, replicas: int, owner: ReplicasOwner) -> InstancePool:
    spec = pool.spec.model_copy(update={"replicas": replicas, "owner": owner})
    return pool.model_copy(update={"spec": spec})


def _plan_rollout_steps(
    view: DeploymentView, desired: Pools, dropped: Pools
) -> Mapping[Role, RolloutStep]:
    """How many instances of each revision to keep now; empty: nothing has to be replaced."""
    pools = {**desired, **dropped}
    roles = {role: _build_role_state(view, role, pool) for role, pool in pools.items()}
    if not any(state.old for state in roles.values()) and not any(roles[r].new for r in dropped):
        return {}
    rollout = view.deployment.spec.rollout
    limits = rollout_planner.RolloutLimits(rollout.max_surge, rollout.max_unavailable, _MAX_SKEW)
    return rollout_planner.plan_next_step(roles, limits)


def _build_role_state(view: DeploymentView, role: Role, desired: InstancePool) -> RoleState:
    """Count the instances of a role by revision.

    Old ones that fail count as leaving: they serve nothing, and may hold the only GPUs on which a
    corrected spec can run.
    """
    pods = [pod for pod in view.pods if pod.role is role and not pod.is_over]
    revision = desired.spec.revision
    new = [pod for pod in pods if pod.revision == revision and not pod.deleting]
    leaving = 0
    older: dict[str, InstanceCount] = {}
    for pod in pods:
        if pod.deleting or (pod.revision != revision and pod.is_failing):
            leaving += 1
        elif pod.revision != revision:
            earlier = older.get(pod.revision, InstanceCount(0, 0))
            older[pod.revision] = InstanceCount(earlier.total + 1, earlier.ready + pod.ready)
    return RoleState(
        replicas=desired.spec.replicas,
        old=sum(count.total for count in older.values()),
        old_ready=sum(count.ready for count in older.values()),
        new=len(new),
        new_ready=sum(pod.ready for pod in new),
        leaving=leaving,
        older=older,
    )


def _apply_pool(
    desired: InstancePool,
    step: RolloutStep | None,
    current: InstancePool | None,
    owner: LLMDeployment,
) -> Iterator[Apply]:
    """Apply a pool unless it is up to date."""
    rollout = PoolRollout(new=step.new, old=step.old, older=dict(step.older)) if step else None
    spec = desired.spec.model_copy(update={"rollout": rollout})
    if current and (current.spec == spec or current.metadata.deletion_timestamp is not None):
        return
    fields = spec.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    fields |= {"replicas": spec.replicas, "owner": str(spec.owner)}
    name, namespace, labels = desired.name, desired.namespace, desired.metadata.labels
    manifest = build_object(desired.api_version, desired.kind, name, namespace, labels, spec=fields)
    # From the start, so that the pool is never deleted without a drain.
    manifest["metadata"]["finalizers"] = [FINALIZER]
    if current is not None and current.spec.owner is not ReplicasOwner.PLAN:
        # The owner of `replicas` may have changed it since: then the write conflicts.
        manifest["metadata"]["resourceVersion"] = current.metadata.resource_version
    yield Apply(apply.with_owner(manifest, owner), is_new=current is None)


def _delete(view: DeploymentView) -> Iterator[Action]:
    """Delete the pools first: their pods drain while the gateway still serves running requests."""
    deployment = view.deployment
    if FINALIZER not in deployment.metadata.finalizers:
        return
    for pool in view.pools:
        if pool.metadata.deletion_timestamp is None:
            yield Delete(apply.build_reference(pool))
    if not view.pools:
        yield apply.remove_finalizer(deployment)
    else:
        yield Requeue(_REQUEUE_S)


def _is_limited(view: DeploymentView) -> bool:
    return any(
        conditions.is_true(status.get("conditions", []), "ScalingLimited")
        for status in view.pool_status.values()
    )
