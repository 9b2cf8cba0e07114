"""How instances are placed on nodes: nodes per instance, and affinity terms. Pure.

Called by the pool and pod builders. vLLM gives each node the same number of consecutive ranks,
stage by stage; an instance in a cell (DistServe's Algorithm 2) has to be split at the same stages
as the others of its cell, so that equal stages share a node.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Self

from cleave.api.cluster import Cluster
from cleave.api.role import MAX_POD_ENGINES, Parallelism
from cleave.manifests.labels import Manifest
from cleave.perf.hardware.gpu import UnknownGpuError, find_gpu
from cleave.planner.plan import PlannedPool

HOSTNAME = "kubernetes.io/hostname"
CLIQUE = "nvidia.com/gpu.clique"
"""Label of nodes whose GPUs share NVLink, as NVIDIA's feature discovery writes it."""
INFINIBAND = "cleave.dev/infiniband-domain"
"""Label of nodes in one InfiniBand fabric; the cluster's administrators set it."""
SPINE = "network.topology.nvidia.com/spine"
"""The same, as NVIDIA's topograph writes it."""
ZONE = "topology.kubernetes.io/zone"

_NETWORK_WEIGHTS = ((INFINIBAND, 100), (SPINE, 60), (ZONE, 20))
"""Node labels of fast networks between nodes, with their weights for the scheduler."""


@dataclass(frozen=True, slots=True)
class NodeTopology:
    """GPUs of the nodes, as far as pools depend on them; empty: every instance fits a node."""

    gpus_per_node: Mapping[str, int] = field(default_factory=dict)
    """By the label of the kind of GPU: GPUs of its largest node."""
    domain: str = HOSTNAME
    """Node label whose value names a group with fast links: a node, or an NVLink clique."""
    rdma_devices: Mapping[str, str] = field(default_factory=dict)
    """By the label of the kind of GPU: the RDMA device that all its nodes offer; empty: none."""

    @classmethod
    def from_cluster(cls, cluster: Cluster) -> Self:
        """What a cluster file says of its nodes."""
        largest: dict[str, int] = {}
        for group in cluster.nodes:
            label = get_product_label(group.gpu)
            largest[label] = max(largest.get(label, 0), group.gpus_per_node)
        return cls(gpus_per_node=largest)

    def get_rdma_device(self, gpu: str | None) -> str:
        """The RDMA device of all nodes of a kind (None: of every kind); empty: there is none."""
        if gpu is None:
            names = set(self.rdma_devices.values())
            return names.pop() if len(names) == 1 else ""
        return self.rdma_devices.get(get_product_label(gpu), self.rdma_devices.get(gpu, ""))

    def get_gpus_per_node(self, gpu: str | None) -> int | None:
        """GPUs of the largest node of a kind (None: of any kind); None: not known."""
        if gpu is None:
            return max(self.gpus_per_node.values(), default=None)
        return self.gpus_per_node.get(get_product_label(gpu), self.gpus_per_node.get(gpu))


def get_product_label(gpu: str) -> str:
    """The node label's value for this kind of GPU."""
    try:
        return find_gpu(gpu).product
    except UnknownGpuError:
        return gpu


def count_nodes(pool: PlannedPool, pools: Sequence[PlannedPool], machines: NodeTopology) -> int:
    """Nodes that one instance of `pool`, as a part of `pools`, spans."""
    room = machines.get_gpus_per_node(pool.gpu)
    if pool.parallelism.data > 1:
        return _count_nodes_of_ranks(pool.parallelism, room)
    if room is None:
        return 1
    if pool.per_cell and machines.domain == HOSTNAME:
        per_node = max(1, room // count_stage_gpus(pools))
        return _find_fewest_nodes(pool.parallelism.pipeline, per_node)
    return _count_even_nodes(pool.parallelism, max(1, room))


def fits_one_pod(pools: Sequence[PlannedPool], machines: NodeTopology) -> bool:
    """Whether every cell of a plan can be one pod: a node has GPUs for all its instances.

    Only the engines of one container reach each other's GPU memory, which Algorithm 2 assumes.
    Where the nodes' GPUs are not known, or other instances are beside the cells, each instance has
    a pod of its own.
    """
    kinds, cells = {pool.gpu for pool in pools}, {_count_cells(pool) for pool in pools}
    room = machines.get_gpus_per_node(pools[0].gpu) if pools else None
    if room is None or len(kinds) > 1 or len(cells) > 1 or not all(pool.per_cell for pool in pools):
        return False
    engines = sum(pool.per_cell or 0 for pool in pools)
    gpus = sum((pool.per_cell or 0) * pool.parallelism.gpus for pool in pools)
    return len(pools) > 1 and engines <= MAX_POD_ENGINES and gpus <= room


def count_cells_per_node(pools: Sequence[PlannedPool], machines: NodeTopology) -> int | None:
    """Cells of a plan that fit on a node; None: not known, or not relevant.

    The scheduler places pods one by one, so several cells could all start on a node and none fit
    completely. As one group they fill the node, and no other cell starts there.
    """
    cell = [pool for pool in pools if pool.per_cell]
    room = machines.get_gpus_per_node(cell[0].gpu) if cell else None
    if room is None or machines.domain != HOSTNAME:
        return None
    pipeline = cell[0].parallelism.pipeline
    stages = pipeline // count_nodes(cell[0], pools, machines)
    return max(1, room // (stages * count_stage_gpus(pools)))


def count_stage_gpus(pools: Sequence[PlannedPool]) -> int:
    """GPUs of one pipeline stage, over all instances of a cell."""
    return sum(each.per_cell * each.parallelism.tensor for each in pools if each.per_cell)


def assign_cells(used_cells: Sequence[int], per_cell: int, num_instances: int) -> list[int]:
    """Assign cells to `num_instances` new instances; `used_cells`: those of the pool's others."""
    used, cells = Counter(used_cells), list[int]()
    for cell in count():
        if len(cells) == num_instances:
            break
        cells += [cell] * min(num_instances - len(cells), max(0, per_cell - used[cell]))
    return cells


def build_network_affinity(labels: Mapping[str, str]) -> list[Manifest]:
    """Preferred pod affinity terms: a fast network to pods with `labels`."""
    return [_build_preferred_term(weight, key, labels) for key, weight in _NETWORK_WEIGHTS]


def build_required_affinity(labels: Mapping[str, str], domain: str) -> list[Manifest]:
    """Required pod affinity terms: the same domain as pods with `labels`."""
    return [{"labelSelector": {"matchLabels": dict(labels)}, "topologyKey": domain}]


def build_anti_affinity_term(labels: Mapping[str, str], key: str, domain: str) -> Manifest:
    """A pod anti-affinity term: no pods that differ from the pod's `labels` in `key` alone."""
    rest = {name: value for name, value in labels.items() if name != key}
    other = [
        {"key": key, "operator": "Exists"},
        {"key": key, "operator": "NotIn", "values": [labels[key]]},
    ]
    selector = {"matchLabels": rest, "matchExpressions": other}
    return {"labelSelector": selector, "topologyKey": domain}


def build_instance_affinity(labels: Mapping[str, str]) -> list[Manifest]:
    """Preferred terms for the pods of one instance: the same NVLink clique or fabric."""
    return [_build_preferred_term(100, CLIQUE, labels), *build_network_affinity(labels)]


def build_topology_spread(labels: Mapping[str, str]) -> list[Manifest]:
    """Topology spread constraint, best effort: few pods with `labels` per node."""
    spread = {"maxSkew": 1, "topologyKey": HOSTNAME, "whenUnsatisfiable": "ScheduleAnyway"}
    return [{**spread, "labelSelector": {"matchLabels": dict(labels)}}]


def _count_cells(pool: PlannedPool) -> int:
    return pool.replicas // (pool.per_cell or 1)


def _build_preferred_term(weight: int, key: str, labels: Mapping[str, str]) -> Manifest:
    return {"weight": weight, "podAffinityTerm": build_required_affinity(labels, key)[0]}


def _count_nodes_of_ranks(size: Parallelism, room: int | None) -> int:
    """The fewest nodes with equally many data-parallel ranks; each rank is on one."""
    fitting = size.data if room is None else room // size.gpus_per_engine
    return _find_fewest_nodes(size.data, max(1, min(fitting, MAX_POD_ENGINES)))


def _find_fewest_nodes(parts: int, per_node: int) -> int:
    """The fewest nodes with equally many parts (stages, ranks), at most `per_node` each."""
    return next(n for n in range(1, parts + 1) if parts % n == 0 and parts // n <= per_node)


def _count_even_nodes(size: Parallelism, room: int) -> int:
    """The fewest nodes with equally many ranks, at most `room` each, without split stages."""
    for nodes in range(1, size.gpus + 1):
        share, rest = divmod(size.gpus, nodes)
        is_even = rest == 0 and (share % size.tensor == 0 or size.tensor % share == 0)
        if is_even and share <= room:
            return nodes
    return size.gpus
