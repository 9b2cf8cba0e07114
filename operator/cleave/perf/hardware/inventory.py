"""The GPU types of a cluster file, each name resolved in the file's descriptions or the catalogue.

Called by the planner and the command line. Nodes whose GPU neither knows are left out: they may be
there for other work.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from cleave.api.cluster import ASSUMED_NETWORK, Cluster, GpuDescription, NetworkSpec, NodeGroup
from cleave.api.manifest import ManifestError
from cleave.api.planning import GpuChoice
from cleave.perf.hardware.gpu import Gpu, PowerCapError, UnknownGpuError, find_gpu
from cleave.perf.hardware.link import Link, LinkKind, build_measured_link, build_network_link


def list_gpus(cluster: Cluster, choices: Sequence[GpuChoice] = ()) -> dict[str, Gpu]:
    """Every GPU type that may be used, by its name (`Gpu.name`), in the order of the nodes.

    `choices` (spec.planning.gpus) select types and set prices and power caps; empty: all types of
    the cluster. Raises ManifestError with a line for every unknown name of `choices`, or of the
    nodes if no node has a known one.
    """
    available = {gpu.name: gpu for _, gpu in list_groups(cluster)}
    if not available:
        raise ManifestError(list(list_unknown_gpus(cluster)))
    own = [to_gpu(description) for description in cluster.gpus]
    return _select(available, choices, own) if choices else available


def list_groups(cluster: Cluster) -> list[tuple[NodeGroup, Gpu]]:
    """The groups of nodes with a known GPU, each with its GPU."""
    own = [to_gpu(description) for description in cluster.gpus]
    groups: list[tuple[NodeGroup, Gpu]] = []
    for group in cluster.nodes:
        with suppress(UnknownGpuError):
            gpu = find_gpu(group.gpu, own)
            groups.append((group, replace(gpu, all_reduce_gbps=_find_all_reduce(cluster, gpu))))
    return groups


def _find_all_reduce(cluster: Cluster, gpu: Gpu) -> float | None:
    """GB/s of all-reduces without NVLink, as the file says; None: NVLink, or it does not say."""
    said = cluster.network.node_all_reduce_gbps if cluster.network else None
    return said / 8 if said and gpu.nvlink_gbps is None else None


def list_unknown_gpus(cluster: Cluster) -> Iterator[str]:
    """A sentence for each group of nodes whose GPU is not known."""
    own = [to_gpu(description) for description in cluster.gpus]
    for index, group in enumerate(cluster.nodes):
        try:
            find_gpu(group.gpu, own)
        except UnknownGpuError as error:
            yield f"nodes[{index}].gpu: {error}; or describe it under gpus"


def to_gpu(description: GpuDescription) -> Gpu:
    """A GPU as a cluster file describes it. What a description of one of the catalogue's leaves
    out, its names among them, is the catalogue's."""
    fields = description.model_dump(by_alias=False)
    try:
        known = find_gpu(description.name)
    except UnknownGpuError:
        return Gpu(**fields)
    given = {name: fields[name] for name in description.model_fields_set}
    return replace(known, **{**given, "name": known.name})


def list_unused_gpus(cluster: Cluster) -> Iterator[str]:
    """A sentence for each described GPU that no node has."""
    used = {gpu.name for _, gpu in list_groups(cluster)}
    for index, gpu in enumerate(map(to_gpu, cluster.gpus)):
        if gpu.name not in used:
            yield f"gpus[{index}]: no node has {gpu.name}; the description has no effect"


def _get_network(cluster: Cluster) -> NetworkSpec:
    return cluster.network.complete(ASSUMED_NETWORK) if cluster.network else ASSUMED_NETWORK


def find_network_link(cluster: Cluster, gpu: Gpu) -> Link:
    """The link from one GPU to another node."""
    network = _get_network(cluster)
    kind = LinkKind(network.kind.value)
    return build_network_link(gpu, network.bandwidth_gbps, network.latency_us, kind)


def find_cell_link(cluster: Cluster, gpu: Gpu) -> Link | None:
    """The link between engines of one pod; None: no engine is known to have reached another one's
    GPU memory, which the data sheet of an NVLink does not show (benchmarks/gpu/README.md)."""
    seen = cluster.network.cell_bandwidth_gbps if cluster.network else None
    return build_measured_link(gpu, seen) if seen and gpu.nvlink_gbps else None


def describe_unseen_cells(cluster: Cluster) -> str | None:
    """A sentence about NVLink between engines of a pod, which a slow network makes worth knowing;
    None: its rate is known, or there is none."""
    network = _get_network(cluster)
    is_slow = LinkKind(network.kind.value) is LinkKind.ETHERNET
    has_nvlink = any(gpu.nvlink_gbps for _, gpu in list_groups(cluster))
    if network.cell_bandwidth_gbps or not (is_slow and has_nvlink):
        return None
    return (
        "KV between engines of one pod was never seen to take NVLink here, so cells count with "
        "the network; network.cellBandwidthGbps states the rate that KV self-tests showed"
    )


def describe_assumed_all_reduces(cluster: Cluster) -> str | None:
    """A sentence about all-reduces over PCIe; None: the file says how fast they are, or no node has
    several GPUs without NVLink."""
    slow = [
        gpu.name
        for group, gpu in list_groups(cluster)
        if group.gpus_per_node > 1 and not (gpu.nvlink_gbps or gpu.all_reduce_gbps)
    ]
    if not slow:
        return None
    return (
        f"all-reduces between {' and '.join(dict.fromkeys(slow))} are counted as where GPUs write "
        "into each other's memory over PCIe; network.nodeAllReduceGbps states what they reach here"
    )


def describe_assumed_network(cluster: Cluster) -> str | None:
    """A sentence about what is assumed of the network; None: the file says it."""
    network = _get_network(cluster)
    assumed = f"{network.kind} with {network.bandwidth_gbps:g} Gbit/s for each GPU is assumed"
    if cluster.network is None or network is not cluster.network:
        return f"network: not in the cluster file; {assumed} for KV and for instances over nodes"
    if "kind" not in cluster.network.model_fields_set:
        return f"network.kind: not in the cluster file; {assumed}"
    return None


def _select(
    available: dict[str, Gpu], choices: Sequence[GpuChoice], own: list[Gpu]
) -> dict[str, Gpu]:
    faults: list[str] = []
    chosen: dict[str, Gpu] = {}
    for index, choice in enumerate(choices):
        path = f"spec.planning.gpus[{index}]"
        try:
            gpu = find_gpu(choice.type, own)
            if gpu.name not in available:
                names = ", ".join(available)
                faults.append(f"{path}.type: the cluster has no {gpu.name}; it has {names}")
                continue
            chosen[gpu.name] = _apply_choice(available[gpu.name], choice)
        except UnknownGpuError as error:
            faults.append(f"{path}.type: {error}")
        except PowerCapError as error:
            faults.append(f"{path}: {error}")
    if faults:
        raise ManifestError(faults)
    return chosen


def _apply_choice(gpu: Gpu, choice: GpuChoice) -> Gpu:
    if choice.power_cap_watts is not None:
        gpu = gpu.with_power_cap(choice.power_cap_watts)
    if choice.price_per_hour is not None:
        gpu = replace(gpu, price_per_hour=choice.price_per_hour)
    return gpu
