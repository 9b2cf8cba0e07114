"""Decides which instances change roles instead of being replaced. Pure.

Called by the deployment's reconcile. When one role has too many instances and another one too few,
and the pods of both differ in the role only, an instance takes the other role and its pod the other
pool's labels: nothing restarts and no model is loaded. Other instances are deleted in one pool and
created in the other by the pools' reconciles.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cleave.api.pool import InstancePool
from cleave.api.role import Role
from cleave.controller.cluster import apply
from cleave.controller.cluster.actions import ObjectReference, Repurpose
from cleave.controller.cluster.objects import ObservedPod
from cleave.controller.pool.pods import choose_victims
from cleave.controller.views import Pools
from cleave.manifests.cell_pod import has_several_engines
from cleave.manifests.labels import POOL, Manifest
from cleave.manifests.labels import ROLE as ROLE_LABEL
from cleave.rpc.fleet_status import FleetInstance


@dataclass(frozen=True, slots=True)
class RoleChange:
    """An instance that is to change its role."""

    pod: ObservedPod
    role: Role


def choose_changes(pods: Sequence[ObservedPod], desired: Pools, current: Pools) -> list[RoleChange]:
    """Choose the instances whose change of role brings the pools closer to `desired`.

    `current`: the present pools. None during a rollout: then revisions decide which ones stay.
    The least loaded instances change first.
    """
    alive = {role: [p for p in pods if p.role is role and p.is_alive] for role in desired}
    if any(pod.revision != desired[role].spec.revision for role in alive for pod in alive[role]):
        return []
    missing = {role: desired[role].spec.replicas - len(alive[role]) for role in desired}
    if not (min(missing.values(), default=0) < 0 < max(missing.values(), default=0)):
        # The common case; the comparison of pools below takes milliseconds.
        return []
    surplus = {
        role: list(choose_victims(_list_eligible(alive[role], current.get(role)), -missing[role]))
        for role in desired
    }
    changes: list[RoleChange] = []
    for receiver, count in missing.items():
        for donor in current:
            if donor not in desired or not are_compatible(current[donor], desired[receiver]):
                continue
            donated = surplus[donor][: max(0, count)]
            surplus[donor] = surplus[donor][len(donated) :]
            count -= len(donated)
            changes += [RoleChange(pod, receiver) for pod in donated]
    return changes


def apply_changes(
    pods: Iterable[ObservedPod], changes: Iterable[RoleChange]
) -> tuple[ObservedPod, ...]:
    """Return the instances as they are after all changes."""
    roles = {change.pod.name: change.role for change in changes}
    return tuple(replace(pod, role=roles.get(pod.name, pod.role)) for pod in pods)


def are_compatible(one: InstancePool, other: InstancePool) -> bool:
    """Whether pods of both pools differ in the role only, and may change pools."""
    if one.spec.nodes > 1 or one.spec.colocation or other.spec.colocation:
        return False
    if has_several_engines(one.spec) or has_several_engines(other.spec):
        return False
    spec = one.spec.model_copy(update={"role": other.spec.role})
    return apply.hash_template(one.model_copy(update={"spec": spec})) == apply.hash_template(other)


def build_actions(changes: Iterable[RoleChange], current: Pools) -> Iterator[Repurpose]:
    """Yield the actions for changes whose new pool exists."""
    for change in changes:
        if pool := current.get(change.role):
            yield _build_action(change.pod, pool, _build_metadata(pool))


def correct_roles(
    pods: Iterable[ObservedPod], instances: Mapping[str, FleetInstance], current: Pools
) -> Iterator[Repurpose]:
    """Yield actions for instances whose configured role differs from their pod's label. The agent's
    role may have been set while the write of the labels failed."""
    for pod in pods:
        reported, pool = instances.get(pod.name), current.get(pod.role)
        is_other = reported is not None and reported.home not in ("", str(pod.role))
        if is_other and pool is not None and pod.is_alive and pod.ip:
            yield _build_action(pod, pool, {})


def _build_action(pod: ObservedPod, pool: InstancePool, metadata: Manifest) -> Repurpose:
    return Repurpose(
        ObjectReference("Pod", pod.namespace, pod.name, pod.uid),
        agent=pod.agents[0],
        role=pool.spec.role,
        metadata=metadata,
        pool=apply.build_reference(pool),
    )


def _build_metadata(pool: InstancePool) -> Manifest:
    """Labels, annotations and owner reference of a pod of this pool."""
    labels = {POOL: pool.name, ROLE_LABEL: str(pool.spec.role)}
    pod = {"kind": "Pod", "metadata": {"labels": labels}}
    annotated = apply.with_template(pod, apply.hash_template(pool))
    metadata: Manifest = apply.with_owner(annotated, pool)["metadata"]
    return metadata


def _list_eligible(pods: Iterable[ObservedPod], pool: InstancePool | None) -> list[ObservedPod]:
    """The pods that are up to date with their pool, ready, and have an address."""
    if pool is None:
        return []
    template = apply.hash_template(pool)
    return [pod for pod in pods if pod.ready and pod.ip and pod.template == template]
