"""Assigns pipeline stages and data-parallel ranks to the GPUs of nodes, for a drawing only. Pure.

Called by the page; the scheduler may place them otherwise. What is hard: the stages of one pipeline
may lie in several nodes, but the GPUs of one stage share a node; under DistServe's Algorithm 2 the
same stages of prefill and decode share one too, because KV does not leave it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from cleave.api.role import Role
from cleave.planner.plan import LOW_AFFINITY, Plan, PlannedPool


@dataclass(frozen=True, slots=True)
class NodeShape:
    """A group of equal nodes."""

    gpu: str
    count: int
    gpus_per_node: int


@dataclass(frozen=True, slots=True)
class Segment:
    """The GPUs of one pipeline stage, or data-parallel rank, of one instance."""

    role: Role
    instance: int
    """Number within its role, from 0."""
    stage: int
    """Number of the stage, or of the rank."""
    gpus: int
    gpu: str | None
    """Required GPU type; None: any."""
    is_rank: bool = False


@dataclass(frozen=True, slots=True)
class LayoutNode:
    """One node with the segments on it."""

    gpu: str
    gpus: int
    segments: tuple[Segment, ...]

    @property
    def free(self) -> int:
        """Unused GPUs."""
        return self.gpus - sum(segment.gpus for segment in self.segments)


def lay_out(plan: Plan, shapes: tuple[NodeShape, ...]) -> tuple[LayoutNode, ...]:
    """The nodes that the plan uses, by first fit; segments without room are left out."""
    machines = [(shape.gpu, shape.gpus_per_node) for shape in shapes for _ in range(shape.count)]
    filled: list[list[Segment]] = [[] for _ in machines]
    free = [gpus for _, gpus in machines]
    first_free: dict[tuple[str | None, int], int] = {}
    for group in _group_segments(plan):
        kind, num_gpus = group[0].gpu, sum(segment.gpus for segment in group)
        # Groups of one size fill from the left, so the search continues where the last one ended.
        node_index = first_free.get((kind, num_gpus), 0)
        while node_index < len(machines) and (
            free[node_index] < num_gpus or kind not in (None, machines[node_index][0])
        ):
            node_index += 1
        first_free[kind, num_gpus] = node_index
        if node_index < len(machines):
            filled[node_index].extend(group)
            free[node_index] -= num_gpus
    return tuple(
        LayoutNode(gpu, gpus, tuple(segments))
        for (gpu, gpus), segments in zip(machines, filled, strict=True)
        if segments
    )


def _group_segments(plan: Plan) -> Iterator[tuple[Segment, ...]]:
    """Segments that must share a node, largest instances first."""
    by_role = {pool.role: pool for pool in plan.pools}
    pools = sorted(plan.pools, key=lambda pool: -pool.parallelism.tensor)
    prefill, decode = by_role.get(Role.PREFILL), by_role.get(Role.DECODE)
    if plan.algorithm.startswith(LOW_AFFINITY) and prefill and decode:
        yield from _pair_segments(prefill, decode)
        pools = [pool for pool in pools if pool.role is Role.MIXED]
    for pool in pools:
        for instance in range(pool.replicas):
            size = pool.parallelism
            for stage in range(size.pipeline * size.data):
                yield (_build_segment(pool, instance, stage),)


def _pair_segments(prefill: PlannedPool, decode: PlannedPool) -> Iterator[tuple[Segment, ...]]:
    """Equal stages of the instances of one cell; cells are as small as possible."""
    units = math.gcd(prefill.replicas, decode.replicas)
    for unit in range(units):
        members = [(p, i) for p in (prefill, decode) for i in range(unit, p.replicas, units)]
        for stage in range(max(pool.parallelism.pipeline for pool, _ in members)):
            yield tuple(
                _build_segment(pool, instance, stage)
                for pool, instance in members
                if stage < pool.parallelism.pipeline
            )


def _build_segment(pool: PlannedPool, instance: int, stage: int) -> Segment:
    size = pool.parallelism
    return Segment(pool.role, instance, stage, size.tensor, pool.gpu, size.data > 1)
