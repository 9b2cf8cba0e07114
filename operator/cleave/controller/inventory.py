"""The machines of a cluster as the planner takes them, read from its nodes. Pure.

Called by the planner's desk and by admission. What is hard: nodes come and go, plans should not. So
there are two digests: one of the kinds of nodes, which a plan rests on, and one of their numbers,
which matters only to a plan that has no room.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cleave.api.cluster import Cluster, Network, NetworkKind, NodeGroup
from cleave.controller.observed import ObservedNode
from cleave.controller.wanted import digest
from cleave.pods.spread import CLIQUE, HOSTNAME, Machines

_ETHERNET_GBPS = 25.0
"""Assumed of nodes that tell of no InfiniBand: what DistServe's test bed had."""


@dataclass(frozen=True, slots=True)
class Inventory:
    """What there is to plan with."""

    cluster: Cluster | None
    """None: no node has GPUs."""
    machines: Machines
    """What pods have to know of them."""
    kinds: str
    """Digest of the kinds of nodes."""
    numbers: str
    """Digest of how many there are of each."""


MOST_GPUS = 128
"""Of one node, as far as the planner looks; a device plug-in that shares GPUs offers any number."""


def inventory(nodes: Iterable[ObservedNode], settings: Cluster | None = None) -> Inventory:
    """The GPU nodes, with network, own GPUs and profiles from `settings` where there are any."""
    there = [node for node in nodes if node.num_gpus and node.gpu]
    groups = Counter((node.gpu, min(node.num_gpus, MOST_GPUS)) for node in there)
    network = Network()
    if not (there and all(node.has_rdma for node in there)):
        network = Network(kind=NetworkKind.ETHERNET, bandwidth_gbps=_ETHERNET_GBPS)
    if settings is not None:
        network = settings.network
    rows = sorted((gpu, size, count) for (gpu, size), count in groups.items())
    cluster = None
    if rows:
        cluster = Cluster(
            nodes=[NodeGroup(gpu=gpu, gpus_per_node=size, count=n) for gpu, size, n in rows],
            network=network,
            gpus=settings.gpus if settings else [],
            profiles=settings.profiles if settings else [],
        )
    base = [[gpu, size] for gpu, size, _ in rows], str(network)
    return Inventory(
        cluster=cluster,
        machines=_machines(there),
        kinds=digest(base),
        numbers=digest(rows),
    )


def _machines(nodes: Sequence[ObservedNode]) -> Machines:
    """What pods have to know of the nodes."""
    largest: dict[str, int] = {}
    for node in nodes:
        largest[node.gpu] = max(largest.get(node.gpu, 0), node.num_gpus)
    has_cliques = bool(nodes) and all(node.clique for node in nodes)
    return Machines(gpus_per_node=largest, domain=CLIQUE if has_cliques else HOSTNAME)
