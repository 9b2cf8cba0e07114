"""Reconciles an InstancePool: from its pods to the actions that correct them. Pure.

Called by the controller for every pool, also for manually created ones. The view may be a moment
old. Names of new pods are derived from the pool and the names in use, so that repeating a decision
creates the same pods once; deletions name the pod's uid.
"""

from collections.abc import Iterator

from cleave.api.pods.worker_template import DeletionPolicy
from cleave.controller.cluster import apply, objects
from cleave.controller.cluster.actions import Action, Delete, ObjectReference, Requeue
from cleave.controller.cluster.apply import FINALIZER
from cleave.controller.cluster.objects import ObservedPod
from cleave.controller.pool import pods as pool_pods
from cleave.controller.pool import status as pool_status
from cleave.controller.pool.relocation import (
    Relocation,
    explain_limit,
    find_relocation,
    keeps_last_instance,
)
from cleave.controller.pool.unschedulable import SchedulingLimit, compute_limit
from cleave.controller.rollout.planner import RoleState, RolloutLimits, RolloutStep, plan_next_step
from cleave.controller.views import PoolInstances, PoolView
from cleave.manifests import network_policies, owned_objects
from cleave.manifests.labels import Manifest

_OWN_ROLLOUT_LIMITS = RolloutLimits(max_surge=1, max_unavailable=0)
"""Of a pool that replaces its pods without a rollout of the deployment."""
_SLACK_S = 60
"""Extra seconds after the grace period before a deleted pool stops waiting for its pods."""
_IMMEDIATE_GRACE_S = 1
_ACCOUNT_WAIT_S = 1.0
_MAX_CREATES = 500
"""Instances created per reconcile: the pool may have changed by the next one."""


def reconcile(view: PoolView) -> list[Action]:
    """Return the actions to take next; none when everything is as desired."""
    pool = view.pool
    if pool.metadata.deletion_timestamp is not None:
        return list(_delete(view))
    actions: list[Action] = [*apply.add_finalizer(pool)]
    pool_instances = _classify_instances(view)
    target = _compute_target(view, pool_instances)
    relocation = find_relocation(view, pool_instances, target)
    if relocation is not None and not relocation.is_replaced:
        target = RolloutStep(new=2, old=0)
    limit_now = compute_limit(
        target.new,
        pool_instances.new,
        now_s=view.now_s,
        timeout_s=pool.spec.pending_timeout_s,
        # A changed pool, such as the next step of a rollout, starts a new attempt as well.
        nodes=f"{view.node_counts_hash}/{pool.metadata.generation or 0}",
        last=pool_status.read_probe(view.status),
    )
    limit_now = explain_limit(limit_now, relocation)
    # Status first: if a later write fails, users still see what exists.
    actions += pool_status.report(view, pool_instances, target, limit_now)
    # The last instance may be evicted where no node has room for a replacement, or for the new
    # instance of a rollout.
    has_successor = relocation is not None or bool(pool_instances.old)
    keeps_last = keeps_last_instance(view) and not (has_successor and limit_now.reason)
    actions += apply.build_changes(_build_owned_objects(view, keeps_last), pool, view.children)
    actions += _replace_ended(view)
    actions += _resize(view, pool_instances, target, limit_now, relocation)
    if limit_now.requeue_after_s is not None:
        actions.append(Requeue(limit_now.requeue_after_s))
    return actions


def _build_owned_objects(view: PoolView, keeps_last: bool) -> list[Manifest]:
    """Objects that do not depend on the pods; a manual pool has those of a deployment, too."""
    pool = view.pool
    budget = owned_objects.build_pool_budget(pool, keeps_last=keeps_last)
    if pool.metadata.owner_references:
        return [budget]
    accounts = owned_objects.build_accounts(pool, view.accounts)
    owned = [*accounts, owned_objects.build_workers_service(pool), budget]
    if (isolation := view.settings.isolation) is not None:
        owned.append(network_policies.build_workers_policy(pool, isolation))
    return owned


def _classify_instances(view: PoolView) -> PoolInstances:
    alive = [(pod, _is_new(pod, view)) for pod in view.instances if pod.is_alive]
    new = tuple(pod for pod, is_new in alive if is_new)
    return PoolInstances(new, tuple(pod for pod, is_new in alive if not is_new))


def _is_new(pod: ObservedPod, view: PoolView) -> bool:
    """Whether a pod is up to date with the pool.

    During a rollout of the deployment its revision decides, which prefill and decode instances must
    share, and while the deployment keeps the pool as it is. Otherwise everything that a pod is
    created from does, Cleave's version included.
    """
    spec = view.pool.spec
    if spec.rollout is not None or view.is_frozen:
        return pod.revision == spec.revision
    return pod.template == view.template_hash


def _compute_target(view: PoolView, fleet: PoolInstances) -> RolloutStep:
    """How many instances to keep now, new and old."""
    spec = view.pool.spec
    if spec.rollout is not None:
        return RolloutStep(spec.rollout.new, spec.rollout.old, spec.rollout.older)
    if not fleet.old:
        return RolloutStep(new=spec.replicas, old=0)
    # What the old spec cannot get to run makes room, as in a rollout of the deployment.
    failing = sum(pod.is_failing for pod in fleet.old)
    state = RoleState(
        replicas=spec.replicas,
        old=len(fleet.old) - failing,
        old_ready=sum(pod.ready for pod in fleet.old),
        new=len(fleet.new),
        new_ready=sum(pod.ready for pod in fleet.new),
        leaving=sum(pod.deleting for pod in view.instances) + failing,
    )
    return plan_next_step({spec.role: state}, _OWN_ROLLOUT_LIMITS)[spec.role]


def _resize(
    view: PoolView,
    fleet: PoolInstances,
    target: RolloutStep,
    limited: SchedulingLimit,
    relocation: Relocation | None,
) -> Iterator[Action]:
    """Yield creations and deletions that bring the pool to its target; no creations before the
    account of the pods is their deployment's own."""
    given_up = {pod.name for pod in limited.evict}
    staying = tuple(pod for pod in fleet.new if pod.name not in given_up)
    # A pool that the plan has dropped may keep instances for a while, but creates none.
    most = target.new if relocation else min(target.new, view.pool.spec.replicas)
    if limited.max_instances is not None:
        most = min(most, limited.max_instances)
    count = min(_MAX_CREATES, max(0, most - len(staying)))
    if view.has_account:
        yield from pool_pods.complete_instances(view, staying)
        yield from pool_pods.create_instances(view, fleet, count)
    elif count:
        # Somebody else's account of this name would give its rights to the pods.
        yield Requeue(_ACCOUNT_WAIT_S)
    victims = [*limited.evict]
    if relocation is not None and relocation.is_replaced:
        victims.append(relocation.leaving)
    else:
        victims += pool_pods.choose_victims(staying, len(staying) - target.new, view.reclaimed)
    for candidates, num_kept in _group_old(fleet.old, target):
        victims += pool_pods.choose_victims(candidates, len(candidates) - num_kept)
    for victim in victims:
        yield from _delete_instance(view, victim)


def _group_old(
    old: tuple[ObservedPod, ...], target: RolloutStep
) -> Iterator[tuple[list[ObservedPod], int]]:
    """Yield old instances with the number to keep, by revision where the rollout specifies it."""
    if not target.older:
        yield list(old), target.old
        return
    for revision in sorted({pod.revision for pod in old}):
        same = [pod for pod in old if pod.revision == revision]
        yield same, target.older.get(revision, 0)


def _delete_instance(
    view: PoolView, instance: ObservedPod, grace_s: int | None = None
) -> Iterator[Delete]:
    """Delete all pods of an instance, or the set, which would otherwise recreate them."""
    if instance.set_name:
        yield Delete(ObjectReference("LeaderWorkerSet", instance.namespace, instance.set_name))
        return
    for pod in view.pods_by_instance[instance.instance_name]:
        if not pod.deleting:
            yield Delete(_refer_to(pod), grace_s)


def _replace_ended(view: PoolView) -> Iterator[Delete]:
    """Delete the remaining pods of instances that have ended or have lost a pod."""
    for instance in view.instances:
        # Without one of its pods an instance cannot serve, so the others go as well.
        if instance.is_over or instance.deleting:
            yield from _delete_instance(view, instance)
    yield from _force_delete_lost(view)


def _force_delete_lost(view: PoolView) -> Iterator[Delete]:
    """Delete pods of lost nodes at once, after their grace period."""
    for pod in view.pods:
        if _is_lost(pod, view):
            yield Delete(_refer_to(pod), grace_s=0)


def _is_lost(pod: ObservedPod, view: PoolView) -> bool:
    """Whether a deleted pod is past its grace period on a node that cannot report its end."""
    node = view.nodes.get(pod.node)
    gone = bool(pod.node) and (node is None or not node.ready)
    return gone and pod.deleted_s is not None and pod.deleted_s < view.now_s


def _delete(view: PoolView) -> Iterator[Action]:
    """Drain every pod, then remove the finalizer, at the latest when the grace period is over."""
    pool = view.pool
    if FINALIZER not in pool.metadata.finalizers:
        return
    grace = _IMMEDIATE_GRACE_S if pool.spec.deletion_policy is DeletionPolicy.IMMEDIATE else None
    for instance in view.instances:
        yield from _delete_instance(view, instance, grace)
    yield from _force_delete_lost(view)
    requested_s = objects.parse_timestamp(pool.metadata.deletion_timestamp) or view.now_s
    remaining_s = requested_s + pool.spec.template.drain_timeout_s + _SLACK_S - view.now_s
    if not view.pods or remaining_s <= 0:
        yield apply.remove_finalizer(pool)
    else:
        yield Requeue(remaining_s)


def _refer_to(pod: ObservedPod) -> ObjectReference:
    return ObjectReference("Pod", pod.namespace, pod.name, pod.uid)
