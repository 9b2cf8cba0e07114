"""The GPU inventory of a cluster, as the planner takes it, from its nodes. Pure.

Called by the controller for the planner and for admission. Nodes come and go, and plans should
stay. So there are two hashes: one of the kinds of nodes, on which a plan depends, and one of their
counts, which matters only to a plan whose instances find no node.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cleave.api.cluster import ASSUMED_NETWORK, Cluster, NetworkKind, NetworkSpec, NodeGroup
from cleave.api.pods.worker_template import WorkerTemplate
from cleave.controller.cluster.apply import hash_content
from cleave.controller.cluster.gpu_claims import FreeGpus, QuotaShare
from cleave.controller.cluster.node_sharing import explain_unreachable
from cleave.controller.cluster.objects import ObservedNode
from cleave.manifests.resources import needs_whole_cards
from cleave.manifests.topology import CLIQUE, HOSTNAME, NodeTopology
from cleave.perf.hardware.gpu import GPU_PRODUCT, Gpu, UnknownGpuError, explain_part, find_gpu
from cleave.perf.hardware.inventory import to_gpu


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
    """Which GPU nodes plans leave out, and why; empty: none."""
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
_LOST = "has been cordoned or not ready for 5 minutes"
_MAX_NAMED = 10
"""Most nodes of a reason, and most reasons, that the status names."""
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
    template: WorkerTemplate | None = None,
) -> Inventory:
    """Build the inventory of the GPU nodes; `settings`: network, own GPUs and profiles.

    `lost`: names of nodes that the counts leave out. Kinds and network are those of all nodes, so
    that no plan changes when nodes are cordoned for a while.
    `needs_own_image`: only of nodes that can run Cleave's image for GPUs; others may run a user's.
    `template`: only of nodes on which the scheduler may put its pods, with the network that they
    get; None: of all, with their best network.

    Nodes of GPUs that are not known, or not whole, are left out of plans. Manual placements may
    name them, so the topology has them.
    """
    own = [to_gpu(description) for description in settings.gpus] if settings else []
    reachable, planned, left_out = _sort_nodes(
        [node for node in nodes if node.num_gpus or node.shared],
        own,
        template,
        needs_own_image=needs_own_image,
    )
    counted = tuple(_select_countable(planned, lost))
    uncounted = {node.name for node in planned} - {node.name for node in counted}
    left_out |= dict.fromkeys(sorted(uncounted), _LOST)
    rows = _count_groups(counted)
    network = _find_network(planned, template)
    if settings and settings.network:
        network = settings.network.complete(network)
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
        topology=_build_topology(reachable, planned or reachable),
        node_kinds_hash=hash_content(base),
        node_counts_hash=hash_content(rows),
        unusable=_describe_left_out(left_out),
        nodes=counted,
    )


def _sort_nodes(
    nodes: Sequence[ObservedNode],
    own: Sequence[Gpu],
    template: WorkerTemplate | None,
    *,
    needs_own_image: bool,
) -> tuple[list[ObservedNode], list[ObservedNode], dict[str, str]]:
    """Return the GPU nodes where pods may be, those of them that plans count, and why, by name,
    plans leave out each of the others."""
    reachable: list[ObservedNode] = []
    planned: list[ObservedNode] = []
    left_out: dict[str, str] = {}
    kinds = {
        gpu: _explain_unplannable(gpu, own, needs_own_image=needs_own_image)
        for gpu in {node.gpu for node in nodes}
    }
    for node in nodes:
        why = node.fault if needs_own_image else ""
        why = why or (explain_unreachable(node.labels, node.taints, template) if template else "")
        reachable += [] if why or not (node.gpu and node.num_gpus) else [node]
        why = why or (kinds[node.gpu] if node.num_gpus else node.shared)
        why = why or ("" if explain_part(node.gpu) else node.shared)
        if why:
            left_out[node.name] = why
        else:
            planned.append(node)
    return reachable, planned, left_out


def _find_network(planned: Sequence[ObservedNode], template: WorkerTemplate | None) -> NetworkSpec:
    """The network between the nodes, for pods of the template."""
    has_cards = template is None or needs_whole_cards(template)
    has_rdma = bool(planned) and all(node.has_rdma(needs_whole_cards=has_cards) for node in planned)
    return NetworkSpec(kind=NetworkKind.INFINIBAND) if has_rdma else ASSUMED_NETWORK


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


def _explain_unplannable(product: str, own: Sequence[Gpu], *, needs_own_image: bool) -> str:
    """Why no plan counts GPUs of this label; empty: plans do, also parts that `own` describes."""
    if not product:
        return f"has no label {GPU_PRODUCT}"
    try:
        gpu = find_gpu(product, own)
    except UnknownGpuError:
        unknown = "is not known; describe it under planning.gpus of the Helm chart to plan with it"
        return f"GPU {product} {explain_part(product) or unknown}"
    return f"GPU {product}: {gpu.limitation}" if needs_own_image and gpu.limitation else ""


def _describe_left_out(reasons: Mapping[str, str]) -> str:
    names: dict[str, list[str]] = {}
    for name, why in reasons.items():
        names.setdefault(why, []).append(name)
    texts = [f"{_join(each)}: {why}" for why, each in names.items()]
    return f"left out of plans: {_join(texts, '; ')}" if texts else ""


def _join(texts: Sequence[str], separator: str = ", ") -> str:
    more = len(texts) - _MAX_NAMED
    return separator.join(texts[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _build_topology(nodes: Sequence[ObservedNode], planned: Sequence[ObservedNode]) -> NodeTopology:
    """Return the node topology that the pod builders need; domains are those of planned nodes."""
    largest: dict[str, int] = {}
    devices: dict[str, set[str]] = {}
    for node in nodes:
        largest[node.gpu] = max(largest.get(node.gpu, 0), node.num_gpus)
        devices.setdefault(node.gpu, set()).add(node.rdma_device)
    has_cliques = bool(planned) and all(node.clique for node in planned)
    return NodeTopology(
        gpus_per_node=largest,
        domain=CLIQUE if has_cliques else HOSTNAME,
        rdma_devices={gpu: min(n) if len(n) == 1 else "" for gpu, n in devices.items()},
    )
