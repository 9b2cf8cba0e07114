"""The machines that a plan may use: the file behind `cleave plan --cluster`.

Not a Kubernetes resource; in a cluster the nodes themselves say this.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from cleave.api.shape import Rule, Shape, keyed_by

Name = Annotated[str, Field(min_length=1, max_length=128)]
Positive = Annotated[float, Field(gt=0)]


class GpuDescription(Shape):
    """A GPU that the catalogue does not know, or knows otherwise."""

    name: Name
    """How nodes and plans call it."""
    memory_gib: Positive
    """Device memory in GiB."""
    memory_gbps: Positive
    """Memory bandwidth in GB/s."""
    dense_tflops: Positive
    """Dense 16-bit matrix throughput in TFLOP/s."""
    fp8_tflops: Positive | None = None
    """Dense 8-bit matrix throughput; absent: the 16-bit one."""
    nvlink_gbps: Positive | None = None
    """Bandwidth to other GPUs of the node in GB/s, one direction; absent: PCIe only."""
    pcie_gbps: Positive = 32.0
    """PCIe bandwidth in GB/s, one direction."""
    power_watts: Positive = 400.0
    """Power at full load."""
    price_per_hour: Annotated[float, Field(ge=0)] = 0.0
    """Price of one GPU for an hour."""


class NodeGroup(Shape):
    """Nodes that are alike."""

    count: Annotated[int, Field(ge=1, le=100_000)] = 1
    """How many."""
    gpu: Name
    """Kind of GPU: a name in the catalogue or under `gpus`."""
    gpus_per_node: Annotated[int, Field(ge=1, le=128)] = 8
    """GPUs in one node."""


class NetworkKind(StrEnum):
    """How bytes get from one node's GPUs to another's."""

    INFINIBAND = "InfiniBand"
    """Also RoCE: the network card reads and writes GPU memory."""
    ETHERNET = "Ethernet"
    """TCP through the memory of both hosts."""


class Network(Shape):
    """The network between nodes."""

    kind: Annotated[NetworkKind, Field(strict=False)] = NetworkKind.INFINIBAND
    """InfiniBand (also RoCE: cards read GPU memory) or Ethernet (TCP through the hosts)."""

    bandwidth_gbps: Positive = 200.0
    """Gigabits per second of one GPU's share, one direction (InfiniBand NDR: 400, HDR: 200)."""
    latency_us: Annotated[float, Field(ge=0)] = 5.0
    """Latency of one message in microseconds."""


class Cluster(Shape):
    """The inventory."""

    nodes: Annotated[list[NodeGroup], Field(min_length=1, max_length=64)]
    """Groups of nodes."""
    network: Network = Network()
    """The network between nodes."""
    gpus: Annotated[list[GpuDescription], keyed_by("name")] = Field(
        default_factory=list, max_length=64
    )
    """Own GPU descriptions."""
    profiles: list[Annotated[str, Field(max_length=1024)]] = Field(
        default_factory=list, max_length=64
    )
    """Measured profiles (files written by `cleave profile`), relative to this file."""

    rules = (
        Rule(
            cel="true",
            holds=lambda c: len({gpu.name for gpu in c.gpus}) == len(c.gpus),
            message="must not name a GPU twice",
            field="gpus",
        ),
    )

    @property
    def total_gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(group.count * group.gpus_per_node for group in self.nodes)
