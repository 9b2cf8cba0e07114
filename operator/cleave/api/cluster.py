"""The machines that a plan may use: the file for `cleave plan --cluster`.

Not a Kubernetes resource; in a cluster the operator reads the nodes.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import BeforeValidator, Field

from cleave.api.base import ApiModel, build_unique_rule, declare_list_map_key

Name = Annotated[str, Field(min_length=1, max_length=128)]
Positive = Annotated[float, Field(gt=0)]


class GpuDescription(ApiModel):
    """A GPU that the catalogue does not have, or whose figures replace the catalogue's; of such a
    one, what is absent here is the catalogue's."""

    name: Name
    """Name by which nodes and plans refer to it."""
    memory_gib: Positive
    """Device memory in GiB."""
    memory_gbps: Positive
    """Memory bandwidth in GB/s."""
    dense_tflops: Positive
    """Dense 16-bit matrix throughput in TFLOP/s."""
    fp8_tflops: Positive | None = None
    """Dense 8-bit matrix throughput in TFLOP/s; absent: the 16-bit one."""
    nvlink_gbps: Positive | None = None
    """Bandwidth to other GPUs of the node in GB/s, in one direction; absent: PCIe only."""
    pcie_gbps: Positive = 32.0
    """PCIe bandwidth in GB/s, in one direction."""
    power_watts: Positive = 400.0
    """Power at full load in watts."""
    price_per_hour: Annotated[float, Field(ge=0)] = 0.0
    """Price of one GPU for one hour in US dollars."""


class NodeGroup(ApiModel):
    """A group of identical nodes."""

    count: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Number of nodes."""
    gpu: Name
    """Kind of GPU: a name in the catalogue or under `gpus`."""
    gpus_per_node: Annotated[int, Field(ge=1, le=128)] = 8
    """GPUs of one node."""
    nvlink_gpus: Annotated[int | None, Field(ge=1, le=1024, alias="nvlinkGPUs")] = None
    """GPUs that NVLink joins across nodes (GB200 NVL72: 72); absent: only those of one node. Ranks
    exchange tokens for their experts over it; KV between instances takes the network."""


class NetworkKind(StrEnum):
    """How data moves from one node's GPUs to another's."""

    INFINIBAND = "InfiniBand"
    """Also RoCE: the network cards read and write GPU memory."""
    ETHERNET = "Ethernet"
    """TCP through the memory of both hosts."""


def _resolve_alias(value: object) -> object:
    return NetworkKind.INFINIBAND if str(value).lower() in {"roce", "rocev2"} else value


class NetworkSpec(ApiModel):
    """The network between nodes."""

    kind: Annotated[NetworkKind, Field(strict=False), BeforeValidator(_resolve_alias)] = (
        NetworkKind.INFINIBAND
    )
    """InfiniBand or RoCE (cards access GPU memory), or Ethernet (TCP through host memory)."""

    bandwidth_gbps: Positive = 200.0
    """Bandwidth per GPU in Gbit/s, in one direction (InfiniBand NDR: 400, HDR: 200)."""
    latency_us: Annotated[float, Field(ge=0)] = 5.0
    """Latency of one message in microseconds."""
    cell_bandwidth_gbps: Positive | None = None
    """Bandwidth per GPU in Gbit/s at which KV moves over NVLink between engines of one pod, as KV
    self-tests reported it; absent: never seen, and plans count with the network there, too."""
    node_all_reduce_gbps: Positive | None = None
    """Bus bandwidth in Gbit/s of long all-reduces between the GPUs of a node without NVLink: eight
    times the busbw of nccl-tests' `all_reduce_perf`, in GB/s. Absent: as on a host whose GPUs write
    into each other's memory (59 % of PCIe between two, 38 % between more)."""

    def complete(self, between_nodes: "NetworkSpec") -> "NetworkSpec":
        """This network; with what another one says of the links between nodes, if this one says
        nothing of them."""
        if self.model_fields_set & {"kind", "bandwidth_gbps", "latency_us"}:
            return self
        within = ("cell_bandwidth_gbps", "node_all_reduce_gbps")
        return between_nodes.model_copy(update={name: getattr(self, name) for name in within})


ASSUMED_NETWORK = NetworkSpec(kind=NetworkKind.ETHERNET, bandwidth_gbps=25.0)
"""The network where nothing says that there is RDMA: that of DistServe's test bed, over TCP."""


class Cluster(ApiModel):
    """The inventory of a cluster."""

    nodes: Annotated[list[NodeGroup], Field(min_length=1, max_length=64)]
    """Groups of nodes."""
    network: NetworkSpec | None = None
    """The network between nodes; absent, or without kind, bandwidthGbps and latencyUs: Ethernet
    with 25 Gbit/s for each GPU. In the operator's settings that means what the nodes' labels and
    devices say."""
    gpus: list[GpuDescription] = declare_list_map_key("name", default_factory=list, max_length=64)
    """Descriptions of GPUs that the catalogue does not have."""
    profiles: list[Annotated[str, Field(max_length=1024)]] = Field(
        default_factory=list, max_length=64
    )
    """Measured profiles (files written by `cleave profile`), with paths relative to this file."""

    rules = (build_unique_rule("gpus", "name", "GPU"),)

    @property
    def total_gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(group.count * group.gpus_per_node for group in self.nodes)
