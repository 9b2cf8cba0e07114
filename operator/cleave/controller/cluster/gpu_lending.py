"""Which instances deployments lend, which of these others reclaim, and what is left to the lender.
Pure.

Called by the controller's reservations. A deployment with `planning.minGPUs` lends its instances
above that number: plans of higher priority count their GPUs as free. Once such a plan is there, its
pods wait, and for each that fits nowhere a node's instances are reclaimed, of the lowest priority
and the fewest GPUs first, as Kubernetes' scheduler preempts pods. (The scheduler itself would know
nothing of a deployment's guarantee, and a pool would start what it has preempted again.)

What is hard: the same decision is made several times while it is carried out, first for the
deployment, which lowers replicas, then for its pools, which delete pods. So it depends on the pods
that are alive, not on the replicas of their pool.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cleave.api.pool import InstancePool
from cleave.controller.cluster.cache import ResourceKey
from cleave.controller.cluster.gpu_claims import GpuClaims, GpuPiece, subtract_claims, sum_claims
from cleave.controller.cluster.objects import ObservedNode, ObservedPod, index_by_instance
from cleave.manifests.resources import Device, count_pod_gpus
from cleave.manifests.topology import get_product_label


class PlacedInstance(NamedTuple):
    """An instance with GPUs on nodes."""

    pool: str
    name: str
    gpus: tuple[tuple[str, int], ...]
    """Node and GPUs of each of its pods that has a node."""

    def count_gpus(self) -> int:
        """All of them."""
        return sum(gpus for _, gpus in self.gpus)


@dataclass(frozen=True, slots=True)
class GpuShare:
    """What a deployment claims, and what it lends of that."""

    claims: GpuClaims = field(default_factory=GpuClaims)
    guaranteed: GpuClaims = field(default_factory=GpuClaims)
    """What no other deployment takes; all, where it lends none."""
    priority: int = 0
    min_gpus: int | None = None
    """None: it lends none."""
    instances: tuple[PlacedInstance, ...] = ()
    """Of a deployment that lends: all that are alive."""
    lent: tuple[PlacedInstance, ...] = ()
    """Those of `instances` that may be reclaimed, in this order."""

    def count_placed(self) -> Counter[str]:
        """GPUs by node; of a lender also those of pods that its pools are about to delete."""
        if self.min_gpus is None:
            return self.claims.placed
        placed = Counter[str]()
        for instance in self.instances:
            _add_gpus(placed, instance)
        return placed


@dataclass(frozen=True, slots=True)
class GpuRoom:
    """What deployments of higher priority leave to one that lends."""

    nodes: tuple[ObservedNode, ...]
    """With the GPUs that further instances may take: none while instances are reclaimed, as their
    pool would delete fewer of them, and none where a pod of higher priority that waits may go."""
    held: tuple[PlacedInstance, ...]
    """Its own instances that are not reclaimed."""
    min_gpus: int
    max_gpus: int | None
    """What the quota of its namespace leaves; None: there is none."""
    borrowers: tuple[str, ...]
    """The deployments of higher priority that have GPUs, the highest first."""


def build_share(
    pools: Iterable[tuple[InstancePool, Sequence[ObservedPod]]],
    device: Device,
    priority: int,
    min_gpus: int | None,
) -> GpuShare:
    """Return what these pools of a deployment, with the pods that exist, claim and lend."""
    pools = list(pools)
    claims = sum_claims(pools, device)
    if min_gpus is None:
        return GpuShare(claims, claims, priority)
    present = [
        (pool, _list_instances(pool, pods, device))
        for pool, pods in pools
        if pool.metadata.deletion_timestamp is None and count_pod_gpus(pool.spec, device)
    ]
    own = Counter[str]()
    for instance in (each for _, group in present for each in group):
        _add_gpus(own, instance)
    for _, group in present:
        # Whole nodes become free when those stay together that stay.
        group.sort(key=lambda each: (-own[each.gpus[0][0]], each.gpus, each.name))
    by_pool = {pool.name: group for pool, group in present}
    counts = {pool.name: max(pool.spec.replicas, len(group)) for pool, group in present}
    sizes = {pool.name: _count_instance_gpus(pool, device) for pool, _ in present}
    guaranteed = count_guaranteed(counts, sizes, min_gpus)
    return GpuShare(
        claims,
        _sum_guaranteed(present, guaranteed, device),
        priority,
        min_gpus,
        tuple(each for _, group in present for each in group),
        tuple(_order_lent(by_pool, counts, guaranteed)),
    )


def count_guaranteed(
    counts: Mapping[str, int], sizes: Mapping[str, int], min_gpus: int
) -> dict[str, int]:
    """How many of the instances of each pool are not lent: one, so that the deployment serves, and
    then by turns, of the pool with the fewest so far, until they have `min_gpus`. `sizes`: GPUs of
    an instance. Fewer instances than planned (`counts`) give the same numbers as long as they hold
    them: the deployment's decision sees the plan, that about its pods what is left."""
    guaranteed = {name: min(1, count) for name, count in counts.items()}
    while sum(guaranteed[name] * sizes[name] for name in guaranteed) < min_gpus:
        short = [name for name, count in counts.items() if guaranteed[name] < count]
        if not short:
            break
        guaranteed[min(short, key=lambda name: (guaranteed[name], name))] += 1
    return guaranteed


def find_reclaimed(
    nodes: Sequence[ObservedNode],
    shares: Mapping[ResourceKey, GpuShare],
    quotas: Mapping[str, int],
) -> dict[ResourceKey, frozenset[str]]:
    """Return the names of the instances that deployments of higher priority reclaim, by deployment.

    `quotas`: GPUs of the namespaces that have a budget. Equal priorities reclaim nothing, nor do
    pods that their own namespace's budget, or the nodes, cannot take.
    """
    lent = [
        _LentInstance(shares[key].priority, key, instance)
        for key in sorted(shares, key=lambda key: (shares[key].priority, key))
        for instance in shares[key].lent
    ]
    highest = max((share.priority for share in shares.values()), default=0)
    if not lent or lent[0].priority >= highest:
        return {}
    reclaim = _Reclaim(nodes, shares, lent)
    for key in sorted(shares, key=lambda key: (-shares[key].priority, key)):
        share = shares[key]
        for piece, count in sorted(share.claims.waiting.items(), reverse=True):
            for _ in range(count):
                num_gpus = quotas.get(key.namespace)
                has_budget = num_gpus is None or reclaim.fits_quota(key, piece.gpus, num_gpus)
                if not has_budget or not reclaim.take(piece, share.priority):
                    break
                reclaim.keep_quota(key, piece.gpus, num_gpus)
    names: dict[ResourceKey, set[str]] = defaultdict(set)
    for each in reclaim.reclaimed:
        names[each.lender].add(each.instance.name)
    return {key: frozenset(each) for key, each in names.items()}


def find_room(
    lender: ResourceKey,
    nodes: Sequence[ObservedNode],
    shares: Mapping[ResourceKey, GpuShare],
    reclaimed: Mapping[ResourceKey, frozenset[str]],
    quota: int | None,
) -> GpuRoom | None:
    """Return what is left to a deployment; None: none of higher priority has GPUs of its kinds, or
    it lends none. `quota`: GPUs of its namespace."""
    own = shares.get(lender, GpuShare())
    borrowers = [
        key
        for key in sorted(shares, key=lambda key: (-shares[key].priority, key))
        if shares[key].priority > own.priority and _may_share(shares[key], own, nodes)
    ]
    if own.min_gpus is None or not borrowers:
        return None
    # What those of lower priority lend is its own to take, so it is not claimed.
    placed, claims, in_namespace = Counter[str](), GpuClaims(), 0
    for key, share in shares.items():
        if key == lender:
            continue
        present = share.count_placed()
        for instance in share.lent:
            if instance.name in reclaimed.get(key, ()):
                _add_gpus(present := present.copy(), instance, -1)
        placed.update(present)
        claimed = GpuClaims(present, share.claims.waiting)
        if share.min_gpus is not None and share.priority < own.priority:
            claimed = share.guaranteed
        claims.placed.update(claimed.placed)
        claims.waiting.update(claimed.waiting)
        if key.namespace == lender.namespace:
            in_namespace += claimed.count_gpus()
    gone = reclaimed.get(lender, frozenset())
    held = tuple(each for each in own.instances if each.name not in gone)
    for instance in held:
        _add_gpus(placed, instance)
        _add_gpus(claims.placed, instance)
    first = [piece for key in borrowers for piece in shares[key].claims.waiting]
    open_nodes = {
        node.name
        for node in nodes
        if not gone
        and not any(
            piece.kind in ("", node.gpu) and piece.gpus <= node.num_gpus - placed[node.name]
            for piece in first
        )
    }
    free = subtract_claims(nodes, claims).nodes
    left = {node.name: node.num_gpus for node in free if node.name in open_nodes}
    return GpuRoom(
        tuple(replace(node, num_gpus=left.get(node.name, 0)) for node in nodes),
        held,
        own.min_gpus,
        None if quota is None else max(0, quota - in_namespace),
        tuple(f"{key.namespace}/{key.name} (priority {shares[key].priority})" for key in borrowers),
    )


def _may_share(share: GpuShare, own: GpuShare, nodes: Sequence[ObservedNode]) -> bool:
    """Whether another deployment has, or waits for, GPUs of a kind that this one has."""
    kinds = {node.name: node.gpu for node in nodes}
    mine = {kinds.get(node) for each in own.instances for node, _ in each.gpus}
    theirs = {kinds.get(node) for node in share.claims.placed}
    waiting = {piece.kind for piece in share.claims.waiting}
    return "" in waiting or bool(mine & (theirs | waiting))


def fit_pools(pools: Sequence[InstancePool], room: GpuRoom, device: Device) -> dict[str, int]:
    """How many instances of each pool, up to its replicas, there is room for: by name, of the pools
    that need GPUs. Those that the deployment does not lend always count."""
    needing = {pool.name: pool for pool in pools if count_pod_gpus(pool.spec, device)}
    counts = {name: pool.spec.replicas for name, pool in needing.items()}
    sizes = {name: _count_instance_gpus(pool, device) for name, pool in needing.items()}
    guaranteed = count_guaranteed(counts, sizes, room.min_gpus)
    free = Counter({node.name: node.num_gpus for node in room.nodes})
    kinds = {node.name: node.gpu for node in room.nodes}
    held = Counter(each.pool for each in room.held)
    for instance in room.held:
        if instance.pool not in needing:
            # A rollout replaces it.
            _add_gpus(free, instance)
    fitting = {name: min(count, held[name]) for name, count in counts.items()}
    full: set[str] = set()
    while short := [name for name in counts if fitting[name] < counts[name] and name not in full]:
        # What is guaranteed has its place first.
        name = min(
            short,
            key=lambda each: (
                fitting[each] >= guaranteed[each],
                fitting[each] / counts[each],
                each,
            ),
        )
        used = sum(count * sizes[each] for each, count in fitting.items())
        is_within = room.max_gpus is None or used + sizes[name] <= room.max_gpus
        if is_within and _take_instance(needing[name], free, kinds, device):
            fitting[name] += 1
        else:
            full.add(name)
    return {name: max(count, guaranteed[name]) for name, count in fitting.items()}


class _LentInstance(NamedTuple):
    priority: int
    lender: ResourceKey
    instance: PlacedInstance


class _Reclaim:
    """The free GPUs of nodes while instances are reclaimed for pods that wait."""

    def __init__(
        self,
        nodes: Sequence[ObservedNode],
        shares: Mapping[ResourceKey, GpuShare],
        lent: Sequence[_LentInstance],
    ) -> None:
        """`lent`: the lowest priority first."""
        self.reclaimed: set[_LentInstance] = set()
        self._shares, self._lent = shares, lent
        self._granted = Counter[str]()
        """GPUs that waiting pods take, by namespace."""
        self._free = Counter({node.name: node.num_gpus for node in nodes})
        # No pod is placed on other nodes.
        self._kinds = {each.name: each.gpu for each in nodes if each.ready and each.schedulable}
        for share in shares.values():
            self._free.subtract(share.count_placed())
        self._lent_on: dict[str, list[_LentInstance]] = defaultdict(list)
        for each in lent:
            for node in {node for node, _ in each.instance.gpus}:
                self._lent_on[node].append(each)

    def take(self, piece: GpuPiece, priority: int) -> bool:
        """Find a node for a pod that waits; returns whether there is one."""
        if node := _find_node(piece, self._free, self._kinds):
            self._free[node] -= piece.gpus
            return True
        options = [
            (max(each.priority for each in victims), _sum_gpus(victims), node, victims)
            for node in self._lent_on
            if node in self._kinds
            and piece.kind in ("", self._kinds[node])
            and (victims := self._choose_victims(node, piece.gpus, priority))
        ]
        if not options:
            return False
        *_, node, victims = min(options, key=lambda option: option[:3])
        for each in victims:
            self._reclaim(each)
        self._free[node] -= piece.gpus
        return True

    def fits_quota(self, key: ResourceKey, gpus: int, num_gpus: int) -> bool:
        """Whether the budget of its namespace holds so many more GPUs of a deployment, once what is
        lent to it there is reclaimed: the API server refuses its pods otherwise."""
        priority = self._shares[key].priority
        lent = _sum_gpus(
            each
            for each in self._lent
            if each.lender.namespace == key.namespace and each.priority < priority
        )
        placed = sum(share.count_placed().total() for share in self._list_members(key))
        return placed - lent + self._granted[key.namespace] + gpus <= num_gpus

    def keep_quota(self, key: ResourceKey, gpus: int, num_gpus: int | None) -> None:
        """Count GPUs that a deployment takes, and reclaim what its namespace's budget needs."""
        self._granted[key.namespace] += gpus
        if num_gpus is None:
            return
        placed = sum(share.count_placed().total() for share in self._list_members(key))
        gone = _sum_gpus(each for each in self.reclaimed if each.lender.namespace == key.namespace)
        excess = placed - gone + self._granted[key.namespace] - num_gpus
        for each in self._lent:
            if excess <= 0 or each.priority >= self._shares[key].priority:
                break
            if each.lender.namespace == key.namespace and each not in self.reclaimed:
                self._reclaim(each)
                excess -= each.instance.count_gpus()

    def _list_members(self, key: ResourceKey) -> Iterator[GpuShare]:
        """Yield what the deployments of a namespace claim."""
        return (each for other, each in self._shares.items() if other.namespace == key.namespace)

    def _choose_victims(self, node: str, gpus: int, priority: int) -> list[_LentInstance]:
        """Instances of lower priority without which a node has room; empty: it has not."""
        victims, room = list[_LentInstance](), self._free[node]
        for each in self._lent_on[node]:
            if room >= gpus or each.priority >= priority:
                break
            if each not in self.reclaimed:
                victims.append(each)
                room += sum(own for name, own in each.instance.gpus if name == node)
        return victims if room >= gpus else []

    def _reclaim(self, each: _LentInstance) -> None:
        self.reclaimed.add(each)
        _add_gpus(self._free, each.instance)


def _sum_gpus(lent: Iterable[_LentInstance]) -> int:
    return sum(each.instance.count_gpus() for each in lent)


def _add_gpus(counts: Counter[str], instance: PlacedInstance, sign: int = 1) -> None:
    for node, gpus in instance.gpus:
        counts[node] += sign * gpus


def _find_node(piece: GpuPiece, free: Counter[str], kinds: Mapping[str, str]) -> str:
    """The node with the least room for a pod; empty: none has room."""
    fitting = (
        (free[node], node)
        for node, kind in kinds.items()
        if free[node] >= piece.gpus and piece.kind in ("", kind)
    )
    return min(fitting, default=(0, ""))[1]


def _take_instance(
    pool: InstancePool, free: Counter[str], kinds: Mapping[str, str], device: Device
) -> bool:
    """Take the GPUs of one more instance of a pool, all or none; returns whether there were."""
    piece, taken = _build_piece(pool, device), list[str]()
    for _ in range(pool.spec.nodes):
        node = _find_node(piece, free, kinds)
        if not node:
            for each in taken:
                free[each] += piece.gpus
            return False
        free[node] -= piece.gpus
        taken.append(node)
    return True


def _build_piece(pool: InstancePool, device: Device) -> GpuPiece:
    kind = get_product_label(pool.spec.gpu) if pool.spec.gpu else ""
    return GpuPiece(count_pod_gpus(pool.spec, device), kind)


def _count_instance_gpus(pool: InstancePool, device: Device) -> int:
    return count_pod_gpus(pool.spec, device) * pool.spec.nodes


def _list_instances(
    pool: InstancePool, pods: Sequence[ObservedPod], device: Device
) -> list[PlacedInstance]:
    """The instances of a pool that have a node. During a rollout those that the pool is to have."""
    gpus = count_pod_gpus(pool.spec, device)
    alive = [pod for pod in pods if pod.is_alive and pod.node]
    if pool.spec.rollout is not None:
        alive.sort(key=lambda pod: (pod.revision != pool.spec.revision, pod.created_s, pod.name))
        alive = alive[: pool.spec.replicas * pool.spec.nodes]
    return [
        PlacedInstance(
            pool.name, name, tuple(sorted((pod.node, pod.num_gpus or gpus) for pod in group))
        )
        for name, group in index_by_instance(alive).items()
    ]


def _sum_guaranteed(
    pools: Iterable[tuple[InstancePool, Sequence[PlacedInstance]]],
    guaranteed: Mapping[str, int],
    device: Device,
) -> GpuClaims:
    claims = GpuClaims()
    for pool, group in pools:
        placed = group[: guaranteed[pool.name]]
        for instance in placed:
            _add_gpus(claims.placed, instance)
        missing = guaranteed[pool.name] * pool.spec.nodes - sum(len(each.gpus) for each in placed)
        if missing > 0:
            claims.waiting[_build_piece(pool, device)] += missing
    return claims


def _order_lent(
    by_pool: Mapping[str, Sequence[PlacedInstance]],
    counts: Mapping[str, int],
    guaranteed: Mapping[str, int],
) -> Iterator[PlacedInstance]:
    """Yield what may be reclaimed so that roles stay in proportion."""
    left = {name: len(group) for name, group in by_pool.items()}
    while names := [name for name in left if left[name] > guaranteed[name]]:
        name = max(names, key=lambda each: (left[each] / counts[each], each))
        left[name] -= 1
        yield by_pool[name][left[name]]
