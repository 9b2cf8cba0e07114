"""Whether machines have room for a manual placement. Pure.

Called by `cleave validate` and `cleave simulate`, and by previews of rollouts, with the machines of
a cluster file; by the operator for the nodes that an instance spans. GPUs are counted as
the operator's pods take them: those of one pod are on one node, an instance above a node is a pod
per node, and equal pipeline stages of a cell share a node.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from cleave.api.cluster import Cluster
from cleave.api.deployment import LLMDeployment, LLMDeploymentSpec
from cleave.api.engine import EngineType
from cleave.api.manifest import ManifestError
from cleave.api.plan import ManualPool
from cleave.api.pool import MAX_INSTANCE_NODES, InstancePool
from cleave.api.role import Role
from cleave.manifests.topology import (
    NodeTopology,
    count_nodes,
    count_stage_gpus,
    get_product_label,
)
from cleave.perf import estimator
from cleave.perf.hardware import inventory, memory
from cleave.perf.hardware.gpu import UnknownGpuError, find_gpu
from cleave.perf.model.model_shape import ModelShape
from cleave.planner import memory_flags
from cleave.planner.placement import to_planned_pool
from cleave.planner.plan import PlannedPool
from cleave.planner.search import packing

_FIELD = "spec.placement.manual"

NodesBySize = Counter[int]
"""GPUs of a node -> number of such nodes."""


def list_misfits(
    deployment: LLMDeployment, cluster: Cluster, shape: ModelShape | None
) -> Iterator[str]:
    """Why the nodes cannot run spec.placement.manual, a line `path: why` each. `shape`: the
    model's; None: not known. Raises ManifestError when the cluster names no known GPU."""
    spec = deployment.spec
    if spec.placement is None:
        return
    nodes = count_nodes_by_gpu(cluster)
    pools = spec.placement.manual
    kinds = [_find_kind(pool, cluster, list(nodes)) for pool in pools]
    faults = [
        f"{_FIELD}[{index}].gpu: {kind}"
        for index, kind in enumerate(kinds)
        if isinstance(kind, UnknownGpuError)
    ]
    if faults:
        yield from faults
        return
    yield from list_span_faults(deployment, NodeTopology.from_cluster(cluster))
    names = [str(kind) for kind in kinds]
    if shape is not None:
        yield from _list_memory_faults(spec, names, cluster, shape)
    if spec.template.has_whole_gpus:
        planned = [to_planned_pool(pool) for pool in pools]
        for kind in dict.fromkeys(names):
            of_kind = [pool for pool, name in zip(planned, names, strict=True) if name == kind]
            if why := explain_no_room(of_kind, kind, nodes[kind]):
                yield f"{_FIELD}: {why}"


def count_nodes_by_gpu(cluster: Cluster) -> Mapping[str, NodesBySize]:
    """Nodes of each kind of GPU, by its name. Raises ManifestError when none is known."""
    inventory.list_gpus(cluster)
    nodes: dict[str, NodesBySize] = {}
    for group, gpu in inventory.list_groups(cluster):
        sizes = nodes.setdefault(gpu.name, Counter())
        sizes[group.gpus_per_node] += group.count
    return nodes


def explain_no_room(pools: Sequence[PlannedPool], kind: str, nodes: NodesBySize) -> str | None:
    """Why the nodes have no room for these pools of one kind of GPU, in one sentence; None: they
    have."""
    room, total = max(nodes), sum(size * count for size, count in nodes.items())
    pieces = _list_pieces(pools, kind, room)
    needed = sum(size * count for size, count in pieces.items())
    if needed > total:
        return (
            f"needs {needed} x {kind}, and the nodes have {total}; use fewer or smaller instances"
        )
    if max(pieces) > room and any(pool.parallelism.data > 1 for pool in pools):
        return (
            f"the GPUs of a data-parallel rank share a node: they are {max(pieces)}, and a node "
            f"has {room} x {kind}; use a smaller tensor or pipeline size"
        )
    if max(pieces) > room:
        return (
            f"the instances of a cell that share a node take {max(pieces)} GPUs, and a node has "
            f"{room} x {kind}; use smaller instances or fewer per cell"
        )
    if packing.is_packable(pieces, nodes):
        return None
    return (
        f"the {needed} x {kind} do not fit the nodes ({_format_sizes(nodes)}): the GPUs of one pod "
        f"are on one node, and these are {_format_sizes(pieces)}; use other sizes"
    )


def explain_no_surge(
    pools: Sequence[InstancePool], counts: Mapping[Role, int], cluster: Cluster
) -> str | None:
    """Why the nodes have no room for so many instances of each role at a time, which a step of a
    rollout needs; None: they have. Instances of all revisions count as large as the new ones.
    Raises ManifestError when a pool names an unknown GPU, or the cluster no known one."""
    nodes = count_nodes_by_gpu(cluster)
    own = [inventory.to_gpu(description) for description in cluster.gpus]
    pieces: dict[str, Counter[int]] = {}
    for pool in pools:
        spec = pool.spec
        if spec.gpu is None and len(nodes) > 1:
            return None  # The scheduler chooses the kind.
        try:
            kind = find_gpu(spec.gpu, own).name if spec.gpu else next(iter(nodes))
        except UnknownGpuError as error:
            raise ManifestError([f"{_FIELD}: gpu of role {spec.role}: {error}"]) from None
        number = spec.nodes * counts.get(spec.role, 0)
        pieces.setdefault(kind, Counter())[spec.gpus // spec.nodes] += number
    for kind, parts in pieces.items():
        if not packing.is_packable(parts, nodes.get(kind, Counter())):
            needed = sum(size * count for size, count in parts.items())
            return (
                f"a step needs {needed} x {kind} ({_format_sizes(parts)}), and the nodes have "
                f"{_format_sizes(nodes.get(kind, Counter()))}: its new instances will wait; free "
                "GPUs, or set maxSurge 0 and maxUnavailable 1 under spec.rollout"
            )
    return None


def _format_sizes(sizes: Mapping[int, int]) -> str:
    """`2 x 8 and 1 x 4`: two of eight GPUs and one of four; `none`."""
    parts = (f"{count} x {size}" for size, count in sorted(sizes.items()) if count)
    return " and ".join(parts) or "none"


def list_span_faults(deployment: LLMDeployment, machines: NodeTopology) -> Iterator[str]:
    """Yield a line `path: why` for each pool of spec.placement.manual whose instances would span
    more nodes than the API allows. Emulated engines span none."""
    spec = deployment.spec
    if spec.placement is None or spec.engine.type is EngineType.EMULATED:
        return
    pools = [to_planned_pool(pool) for pool in spec.placement.manual]
    for index, pool in enumerate(pools):
        size, spanned = pool.parallelism, count_nodes(pool, pools, machines)
        if spanned > MAX_INSTANCE_NODES:
            yield (
                f"{_FIELD}[{index}].parallelism: an instance of {size.gpus} GPUs (tensor "
                f"{size.tensor}, pipeline {size.pipeline}) would span {spanned} nodes, and may "
                f"span {MAX_INSTANCE_NODES}; the largest node has "
                f"{machines.get_gpus_per_node(pool.gpu)} GPUs: set smaller sizes, or use nodes "
                "with more GPUs"
            )


def _find_kind(pool: ManualPool, cluster: Cluster, kinds: Sequence[str]) -> str | UnknownGpuError:
    """The name of the pool's kind of GPU, or why there is none."""
    there = ", ".join(kinds)
    if pool.gpu is None:
        if len(kinds) == 1:
            return kinds[0]
        return UnknownGpuError(f"required where nodes have several kinds: one of {there}")
    try:
        name = find_gpu(pool.gpu, map(inventory.to_gpu, cluster.gpus)).name
    except UnknownGpuError as error:
        return error
    return name if name in kinds else UnknownGpuError(f"no node has {name}; there is {there}")


def _list_memory_faults(
    spec: LLMDeploymentSpec, kinds: Sequence[str], cluster: Cluster, shape: ModelShape
) -> Iterator[str]:
    """Pools whose engines would end at their start: for the weights, or for the KV of the longest
    request."""
    # What may start is not refused.
    reserve = replace(memory_flags.build_reserve(spec.engine), start_margin=0.0)
    longest = spec.model.max_model_len or shape.max_model_len
    found = estimator.build_estimator(
        shape, cluster, max_model_len=longest, reserve=reserve, least_context=longest
    )
    for index, (pool, kind) in enumerate(zip(spec.manual_pools, kinds, strict=True)):
        size = pool.parallelism
        sizes, gpu = (size.tensor, size.pipeline), found.machines[kind].gpu
        # A profile may have measured that it fits; instances above a node are not estimated.
        if size.data > 1 or found.explain_unsupported(kind, *sizes) is not None:
            why = memory.explain_unsupported(
                *(shape, gpu, *sizes, reserve, size.data),
                expert=size.expert,
                context_tokens=longest,
            )
            if why is not None:
                smaller = ", or set a smaller spec.model.maxModelLen" * (memory.NO_ROOM in why)
                remedy = f"use more GPUs for an instance{smaller}"
                yield f"{_FIELD}[{index}].parallelism: {why}; {remedy}"


def _list_pieces(pools: Sequence[PlannedPool], kind: str, room: int) -> Counter[int]:
    """GPUs that must share a node -> number of such groups."""
    machines = NodeTopology(gpus_per_node={get_product_label(kind): room})
    pieces: Counter[int] = Counter()
    cell = [pool for pool in pools if pool.per_cell]
    if cell:
        first = cell[0]
        cells = first.replicas // (first.per_cell or 1)
        pieces[count_stage_gpus(cell)] += first.parallelism.pipeline * cells
    for pool in pools:
        if not pool.per_cell:
            spanned = count_nodes(pool, pools, machines)
            pieces[pool.parallelism.gpus // spanned] += spanned * pool.replicas
    return pieces
