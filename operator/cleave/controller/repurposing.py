"""Which instances change pools instead of being replaced. Pure.

Called by the deployment's reconcile. When one role has an instance too many and another one too
few, and both are made alike but for the role, the instance takes the other role and its pod the
other pool's labels: nothing restarts and no model is loaded. What cannot move is deleted there and
made anew here, as pools do by themselves.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cleave.api.pool import InstancePool
from cleave.api.role import Role
from cleave.controller import wanted
from cleave.controller.actions import Reference, Repurpose
from cleave.controller.instances import Instance
from cleave.controller.observed import TEMPLATE, ObservedPod
from cleave.controller.shrink import choose_victims
from cleave.pods.labels import AGENT_PORT, POOL, Manifest
from cleave.pods.labels import ROLE as ROLE_LABEL

Pools = Mapping[Role, InstancePool]


@dataclass(frozen=True, slots=True)
class Move:
    """An instance that is to have another role."""

    pod: ObservedPod
    role: Role


def choose(pods: Sequence[ObservedPod], goals: Pools, there: Pools) -> list[Move]:
    """The instances to move, so that pools come closer to `goals`; `there`: pools as they are.

    None while anything is rolled out: then revisions say who stays. The emptiest move first.
    """
    alive = {role: [p for p in pods if p.role is role and _stays(p)] for role in goals}
    if any(pod.revision != goals[role].spec.revision for role in alive for pod in alive[role]):
        return []
    missing = {role: goals[role].spec.replicas - len(alive[role]) for role in goals}
    if not (min(missing.values(), default=0) < 0 < max(missing.values(), default=0)):
        # So it is nearly always, and to compare pools takes milliseconds.
        return []
    spare = {
        role: list(choose_victims(_movable(alive[role], there.get(role)), -missing[role]))
        for role in goals
    }
    moves: list[Move] = []
    for receiver, count in missing.items():
        for donor in there:
            if donor not in goals or not are_alike(there[donor], goals[receiver]):
                continue
            taken = spare[donor][: max(0, count)]
            spare[donor] = spare[donor][len(taken) :]
            count -= len(taken)
            moves += [Move(pod, receiver) for pod in taken]
    return moves


def after(pods: Iterable[ObservedPod], moves: Iterable[Move]) -> tuple[ObservedPod, ...]:
    """The instances as they are when all have moved."""
    roles = {move.pod.name: move.role for move in moves}
    return tuple(replace(pod, role=roles.get(pod.name, pod.role)) for pod in pods)


def are_alike(one: InstancePool, other: InstancePool) -> bool:
    """Whether instances of both are made alike but for the role, and are free to move."""
    if one.spec.nodes > 1 or one.spec.colocation or other.spec.colocation:
        return False
    spec = one.spec.model_copy(update={"role": other.spec.role})
    return wanted.template(one.model_copy(update={"spec": spec})) == wanted.template(other)


def moved(moves: Iterable[Move], there: Pools) -> Iterator[Repurpose]:
    """The orders, for those whose new pool is there."""
    for move in moves:
        if move.role in there:
            yield _order(move.pod, there[move.role], _metadata(there[move.role]))


def corrected(
    pods: Iterable[ObservedPod], instances: Mapping[str, Instance], there: Pools
) -> Iterator[Repurpose]:
    """Orders to instances that take another role for their own than their pod says.

    An order may have arrived whose other half, the labels, has not.
    """
    for pod in pods:
        known, pool = instances.get(pod.name), there.get(pod.role)
        is_other = known is not None and known.home not in ("", str(pod.role))
        if is_other and pool is not None and _stays(pod) and pod.ip:
            yield _order(pod, pool, {})


def _order(pod: ObservedPod, pool: InstancePool, metadata: Manifest) -> Repurpose:
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    return Repurpose(
        Reference("Pod", pod.namespace, pod.name, pod.uid),
        agent=f"{host}:{AGENT_PORT}",
        role=pool.spec.role,
        metadata=metadata,
        pool=wanted.reference(pool),
    )


def _metadata(pool: InstancePool) -> Manifest:
    """What a pod says of the pool that it belongs to."""
    labels = {POOL: pool.name, ROLE_LABEL: str(pool.spec.role)}
    pod = {"kind": "Pod", "metadata": {"labels": labels}}
    owned = wanted.owned(wanted.annotated(pod, TEMPLATE, wanted.template(pool)), pool)
    metadata: Manifest = owned["metadata"]
    return metadata


def _movable(pods: Iterable[ObservedPod], pool: InstancePool | None) -> list[ObservedPod]:
    """Those that are as their pool makes them now, and whose agents answer."""
    if pool is None:
        return []
    template = wanted.template(pool)
    return [pod for pod in pods if pod.ready and pod.ip and pod.template == template]


def _stays(pod: ObservedPod) -> bool:
    return not (pod.deleting or pod.is_over)
