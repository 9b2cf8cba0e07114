"""The GPU inventory of a cluster, as the planner takes it, from its nodes. Pure.

Called by the controller for the planner and for admission. Nodes come and go, and plans should
stay. So there are two hashes: one of the kinds of nodes, on which a plan depends, and one of their
counts, which matters only to a plan whose instances find no node.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cleave.api.cluster import ASSUMED_NETWORK, Cluster, NetworkKind, NetworkSpec, NodeGroup
from cleave.controller.cluster.apply import hash_content
from cleave.controller.cluster.gpu_claims import FreeGpus, QuotaShare
from cleave.controller.cluster.objects import ObservedNode
from cleave.manifests.topology import CLIQUE, HOSTNAME, NodeTopology


@dataclass(frozen=True, slots=True)
class Inventory:
    """GPUs, topology and hashes of the nodes."""

    cluster: Cluster | None
    """Input of the planner; None: no node has GPUs."""
    topology: NodeTopology
    """Input of the pod builders."""
    node_kinds_hash: str
    """Hash of the kinds of nodes and of the network."""
    node_counts_hash: str
    """Hash of the node counts by kind."""
    unusable: str = ""
    """Which GPU nodes cannot run Cleave's own image, and why; empty: all can."""
    nodes: tuple[ObservedNode, ...] = field(default=(), compare=False)
    """The nodes that `cluster` counts."""


@dataclass(frozen=True, slots=True)
class PlanMachines:
    """The machines that one plan may use."""

    cluster: Cluster | None
    """None: no node has GPUs, or none are left."""
    counts_hash: str = ""
    """Hash of the node counts by kind and by GPUs that are left."""
    taken: str = ""
    """How many GPUs other deployments have, and which quota leaves fewer; empty: none."""
    max_gpus: int | None = None
    """What the namespace's quota leaves; None: there is none."""


UNUSABLE_S = 300.0
"""A node that has been unusable for longer does not count. It counts again at once."""
_MAX_GROUPS = 64
"""Most groups of equal nodes in a `Cluster`."""
MAX_GPUS_PER_NODE = 128
"""Most GPUs of one node that the planner considers; a device plug-in that shares GPUs may offer any
number."""


def list_lost(nodes: Iterable[ObservedNode], now_s: float) -> frozenset[str]:
    """Names of the nodes that have been cordoned or not ready for longer than UNUSABLE_S: where
    Node objects of lost machines are not deleted, plans would ask for them for ever."""
    return frozenset(node.name for node in nodes if _is_lost(node, now_s))


def _is_lost(node: ObservedNode, now_s: float) -> bool:
    return node.unusable_since_s is not None and now_s - node.unusable_since_s > UNUSABLE_S


def _select_countable(
    nodes: Iterable[ObservedNode], lost: frozenset[str]
) -> Iterator[ObservedNode]:
    """The nodes without those that are lost.

    A kind of which no node would be left counts whole. Plans depend on the kinds, and when all
    nodes of one seem lost, rather the control plane has lost them, as in Kubernetes' own eviction.
    """
    by_kind: dict[tuple[str, int], list[ObservedNode]] = {}
    for node in nodes:
        by_kind.setdefault((node.gpu, node.num_gpus), []).append(node)
    for group in by_kind.values():
        yield from [node for node in group if node.name not in lost] or group


def build_inventory(
    nodes: Iterable[ObservedNode],
    settings: Cluster | None = None,
    *,
    lost: frozenset[str] = frozenset(),
    needs_own_image: bool = False,
    needs_whole_cards: bool = True,
) -> Inventory:
    """Build the inventory of the GPU nodes; `settings`: network, own GPUs and profiles.

    `lost`: names of nodes that the counts leave out. Kinds and network are those of all nodes, so
    that no plan changes when nodes are cordoned for a while.
    `needs_own_image`: only of nodes that can run Cleave's image for GPUs; others may run a user's.
    `needs_whole_cards`: whether pods request network cards that nodes offer as wholes.
    """
    all_gpu_nodes = [node for node in nodes if node.num_gpus and node.gpu]
    gpu_nodes = [node for node in all_gpu_nodes if not (needs_own_image and node.fault)]
    counted = tuple(_select_countable(gpu_nodes, lost))
    rows = _count_groups(counted)
    has_rdma = bool(gpu_nodes) and all(
        node.has_rdma(needs_whole_cards=needs_whole_cards) for node in gpu_nodes
    )
    network = NetworkSpec(kind=NetworkKind.INFINIBAND) if has_rdma else ASSUMED_NETWORK
    if settings is not None and settings.network is not None:
        network = settings.network
    cluster = None
    if rows:
        cluster = Cluster(
            nodes=_to_groups(rows),
            network=network,
            gpus=settings.gpus if settings else [],
            profiles=settings.profiles if settings else [],
        )
    base = [[gpu, size] for gpu, size, _ in rows], str(network)
    return Inventory(
        cluster=cluster,
        topology=_build_topology(gpu_nodes),
        node_kinds_hash=hash_content(base),
        node_counts_hash=hash_content(rows),
        unusable=_explain_unusable(all_gpu_nodes),
        nodes=counted,
    )


def select_free(whole: Inventory, free: FreeGpus, quota: QuotaShare | None = None) -> PlanMachines:
    """The machines of an inventory with the GPUs that other deployments, and the quota of the
    namespace, leave. Kinds and network stay those of all nodes, so that no plan changes with
    another deployment's."""
    machines = PlanMachines(whole.cluster, whole.node_counts_hash)
    if whole.cluster is not None and free.num_taken:
        rows = _count_groups(free.nodes)
        machines = PlanMachines(
            whole.cluster.model_copy(update={"nodes": _to_groups(rows)}) if rows else None,
            hash_content(rows),
            f"other deployments have {free.num_taken} of {free.num_total} GPUs",
        )
    if quota is None:
        return machines
    if quota.num_left >= free.num_total - free.num_taken:
        # It bounds what scaling adds later.
        return replace(machines, max_gpus=quota.num_left)
    return PlanMachines(
        machines.cluster if quota.num_left else None,
        hash_content([machines.counts_hash, quota.num_left]),
        "; ".join(filter(None, (str(quota), machines.taken))),
        quota.num_left,
    )


def _count_groups(nodes: Iterable[ObservedNode]) -> list[tuple[str, int, int]]:
    """Kind, GPUs and number of equal nodes, sorted; of very many groups the largest."""
    groups = Counter((node.gpu, min(node.num_gpus, MAX_GPUS_PER_NODE)) for node in nodes)
    rows = [(gpu, size, count) for (gpu, size), count in groups.items()]
    rows.sort(key=lambda row: (-row[1] * row[2], row))
    return sorted(rows[:_MAX_GROUPS])


def _to_groups(rows: Iterable[tuple[str, int, int]]) -> list[NodeGroup]:
    return [NodeGroup(gpu=gpu, gpus_per_node=size, count=count) for gpu, size, count in rows]


def _explain_unusable(nodes: Sequence[ObservedNode]) -> str:
    faulty = [node for node in nodes if node.fault]
    if not faulty:
        return ""
    more = f" (and {len(faulty) - 1} more)" if len(faulty) > 1 else ""
    return f"not used: node {faulty[0].name}{more} {faulty[0].fault}"


def _build_topology(nodes: Sequence[ObservedNode]) -> NodeTopology:
    """Return the node topology that the pod builders need."""
    largest: dict[str, int] = {}
    devices: dict[str, set[str]] = {}
    for node in nodes:
        largest[node.gpu] = max(largest.get(node.gpu, 0), node.num_gpus)
        devices.setdefault(node.gpu, set()).add(node.rdma_device)
    has_cliques = bool(nodes) and all(node.clique for node in nodes)
    return NodeTopology(
        gpus_per_node=largest,
        domain=CLIQUE if has_cliques else HOSTNAME,
        rdma_devices={gpu: min(n) if len(n) == 1 else "" for gpu, n in devices.items()},
    )
