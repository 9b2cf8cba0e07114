"""GPUs that deployments use or have been promised, so that no plan counts them twice. Pure.

Called by the controller's reservations. What is hard: plans stay for long, so they must not depend
on what passes. A pool claims the pods that it is to have, wherever they are now: pods that wait for
a node count, those that drain, or that a rollout has beside them, do not.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from cleave.api.pool import InstancePool
from cleave.controller.cluster.objects import ObservedNode, ObservedPod
from cleave.manifests.resources import Device, count_pod_gpus
from cleave.manifests.topology import get_product_label


class GpuPiece(NamedTuple):
    """The GPUs of a pod that no node is assigned to yet."""

    gpus: int
    kind: str
    """Value of the node label for the kind of GPU; empty: any kind."""


@dataclass(frozen=True, slots=True)
class GpuClaims:
    """What pools claim together."""

    placed: Counter[str] = field(default_factory=Counter)
    """GPUs by node."""
    waiting: Counter[GpuPiece] = field(default_factory=Counter)
    """Number of pods without a node."""

    def count_gpus(self) -> int:
        """All of them."""
        return self.placed.total() + sum(piece.gpus * n for piece, n in self.waiting.items())


@dataclass(frozen=True, slots=True)
class FreeGpus:
    """What claims leave of some nodes."""

    nodes: tuple[ObservedNode, ...]
    """With the GPUs that are left; those without any are left out."""
    num_taken: int
    """GPUs of these nodes that are claimed."""
    num_total: int


@dataclass(frozen=True, slots=True)
class QuotaShare:
    """What the ResourceQuota of its namespace leaves a deployment."""

    name: str
    num_left: int
    """GPUs that this deployment may claim together with those that it has."""
    num_total: int

    def __str__(self) -> str:
        return f"ResourceQuota {self.name} leaves {self.num_left} of {self.num_total} GPUs"


def sum_claims(
    pools: Iterable[tuple[InstancePool, Iterable[ObservedPod]]], device: Device
) -> GpuClaims:
    """Add up what pools claim; with each pool the pods that exist."""
    claims = GpuClaims()
    for pool, pods in pools:
        spec, gpus = pool.spec, count_pod_gpus(pool.spec, device)
        if not gpus or pool.metadata.deletion_timestamp is not None:
            continue
        count = spec.replicas * spec.nodes
        placed = [pod for pod in pods if pod.is_alive and pod.node]
        # In a rollout the pods of the new revision stay.
        placed.sort(key=lambda pod: (pod.revision != spec.revision, pod.created_s, pod.name))
        for pod in placed[:count]:
            claims.placed[pod.node] += pod.num_gpus or gpus
        if count > len(placed):
            kind = get_product_label(spec.gpu) if spec.gpu else ""
            claims.waiting[GpuPiece(gpus, kind)] += count - len(placed)
    return claims


def has_freed(before: GpuClaims, now: GpuClaims) -> bool:
    """Whether a deployment leaves others GPUs that it claimed before. Not where its pods get nodes:
    their claims move there."""
    given = sum(piece.gpus * count for piece, count in (before.waiting - now.waiting).items())
    return bool(before.placed - now.placed) or given > (now.placed - before.placed).total()


def subtract_claims(nodes: Sequence[ObservedNode], claims: GpuClaims) -> FreeGpus:
    """What claims leave of the GPU nodes.

    Where the scheduler puts pods without a node is not known: here they take the tightest fit,
    largest first, so most large pieces stay whole. One that fits nowhere takes nothing.
    """
    free = {node.name: max(0, node.num_gpus - claims.placed[node.name]) for node in nodes}
    rooms: dict[tuple[str, int], list[str]] = {}
    for node in sorted(nodes, key=lambda node: node.name):
        rooms.setdefault((node.gpu, free[node.name]), []).append(node.name)
    for piece, count in sorted(claims.waiting.items(), reverse=True):
        for _ in range(count):
            if not _take_piece(piece, rooms, free):
                break
    left = tuple(
        node if free[node.name] == node.num_gpus else replace(node, num_gpus=free[node.name])
        for node in nodes
        if free[node.name]
    )
    total = sum(node.num_gpus for node in nodes)
    return FreeGpus(left, total - sum(free.values()), total)


def _take_piece(
    piece: GpuPiece, rooms: dict[tuple[str, int], list[str]], free: dict[str, int]
) -> bool:
    """Take a piece from the node with the least room for it; returns whether there is one.
    `rooms`: names of nodes, sorted, by kind and free GPUs."""
    fitting = [
        (room, kind)
        for (kind, room), names in rooms.items()
        if names and room >= piece.gpus and piece.kind in ("", kind)
    ]
    if not fitting:
        return False
    room, kind = min(fitting)
    name = heapq.heappop(rooms[kind, room])
    free[name] = room - piece.gpus
    heapq.heappush(rooms.setdefault((kind, free[name]), []), name)
    return True
