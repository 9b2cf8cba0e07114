"""How instances spread over nodes: how many nodes one takes, and which ones share nodes. Pure.

Called by the pools' builder and by whoever makes pods of a pool. What is hard: vLLM gives each node
the same number of consecutive ranks, stage by stage; an instance in a cell (DistServe's Algorithm
2) has to be cut where the others of its cell are cut, so that equal stages stay together.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from cleave.api.role import Parallelism
from cleave.perf.gpu import UnknownGpuError, find
from cleave.planner.plan import PlannedPool
from cleave.pods.labels import Manifest

HOSTNAME = "kubernetes.io/hostname"
CLIQUE = "nvidia.com/gpu.clique"
"""Label of nodes whose GPUs share NVLink, as NVIDIA's feature discovery writes it."""
INFINIBAND = "cleave.dev/infiniband-domain"
"""Label of nodes that reach each other over one InfiniBand fabric; whoever runs them writes it."""
SPINE = "network.topology.nvidia.com/spine"
"""The same as NVIDIA's topograph writes it."""
ZONE = "topology.kubernetes.io/zone"

_NEAR = ((INFINIBAND, 100), (SPINE, 60), (ZONE, 20))
"""Labels of nodes that KV travels fast between, and how much each counts to the scheduler."""


@dataclass(frozen=True, slots=True)
class Machines:
    """What pools have to know of the nodes; nothing known: every instance fits a node."""

    gpus_per_node: Mapping[str, int] = field(default_factory=dict)
    """By kind of GPU, as nodes are labelled; the largest node of a kind."""
    domain: str = HOSTNAME
    """Label of nodes that names what GPUs share fast links: a node, or an NVLink clique."""

    def room(self, gpu: str | None) -> int | None:
        """GPUs of the largest node of a kind (None: of any kind); None: not known."""
        if gpu is None:
            return max(self.gpus_per_node.values(), default=None)
        return self.gpus_per_node.get(product(gpu), self.gpus_per_node.get(gpu))


def product(gpu: str) -> str:
    """How nodes with this kind of GPU are labelled."""
    try:
        return find(gpu).product
    except UnknownGpuError:
        return gpu


def num_nodes(pool: PlannedPool, pools: Sequence[PlannedPool], machines: Machines) -> int:
    """Nodes that one instance of `pool` is spread over, as a part of `pools`."""
    room = machines.room(pool.gpu)
    if room is None:
        return 1
    if pool.per_cell and machines.domain == HOSTNAME:
        return _fewest(pool.parallelism.pipeline, max(1, room // _stage(pools)))
    return _parts(pool.parallelism, max(1, room))


def cells_per_node(pools: Sequence[PlannedPool], machines: Machines) -> int | None:
    """How many cells of a plan a node has room for; None: not known, or no matter.

    The scheduler takes pods one by one, so cells that could share a node could all be begun there
    and none completed. Taken together they fill the node, and nobody else is to begin there.
    """
    cell = [pool for pool in pools if pool.per_cell]
    room = machines.room(cell[0].gpu) if cell else None
    if room is None or machines.domain != HOSTNAME:
        return None
    pipeline = cell[0].parallelism.pipeline
    stages = pipeline // num_nodes(cell[0], pools, machines)
    return max(1, room // (stages * _stage(pools)))


def free_cells(taken: Sequence[int], per_cell: int, wanted: int) -> list[int]:
    """Cells for `wanted` new instances of a pool; `taken` has the cell of each that is there."""
    used, found = Counter(taken), list[int]()
    for cell in count():
        if len(found) == wanted:
            break
        found += [cell] * min(wanted - len(found), max(0, per_cell - used[cell]))
    return found


def near(labels: Mapping[str, str]) -> list[Manifest]:
    """Preferred terms of a pod affinity: where KV travels fast to pods with `labels`."""
    return [_preferred(weight, key, labels) for key, weight in _NEAR]


def together(labels: Mapping[str, str], domain: str) -> list[Manifest]:
    """Required terms of a pod affinity: in the same domain as pods with `labels`."""
    return [{"labelSelector": {"matchLabels": dict(labels)}, "topologyKey": domain}]


def away(labels: Mapping[str, str], key: str, domain: str) -> Manifest:
    """A term of a pod anti-affinity: not with pods that have another value of `key`.

    `labels` are the pod's own; of the others, those count that share all the rest.
    """
    rest = {name: value for name, value in labels.items() if name != key}
    other = [
        {"key": key, "operator": "Exists"},
        {"key": key, "operator": "NotIn", "values": [labels[key]]},
    ]
    selector = {"matchLabels": rest, "matchExpressions": other}
    return {"labelSelector": selector, "topologyKey": domain}


def linked(labels: Mapping[str, str]) -> list[Manifest]:
    """Preferred terms for the pods of one instance: within one NVLink clique, or one fabric."""
    return [_preferred(100, CLIQUE, labels), *near(labels)]


def apart(labels: Mapping[str, str]) -> list[Manifest]:
    """Topology spread, as far as it goes: a lost node takes few of the pods with `labels`."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": HOSTNAME,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": dict(labels)},
        }
    ]


def _stage(pools: Sequence[PlannedPool]) -> int:
    """GPUs of one pipeline stage of all instances of a cell."""
    return sum(each.per_cell * each.parallelism.tensor for each in pools if each.per_cell)


def _preferred(weight: int, key: str, labels: Mapping[str, str]) -> Manifest:
    return {"weight": weight, "podAffinityTerm": together(labels, key)[0]}


def _fewest(stages: int, per_node: int) -> int:
    """The fewest nodes that take equally many of the stages, at most `per_node` each."""
    return next(n for n in range(1, stages + 1) if stages % n == 0 and stages // n <= per_node)


def _parts(size: Parallelism, room: int) -> int:
    """The fewest nodes with equally many ranks, at most `room` each, that cut no stage unevenly."""
    for nodes in range(1, size.gpus + 1):
        share, rest = divmod(size.gpus, nodes)
        is_even = rest == 0 and (share % size.tensor == 0 or size.tensor % share == 0)
        if is_even and share <= room:
            return nodes
    return size.gpus
