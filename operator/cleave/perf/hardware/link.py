"""Links between GPUs: times of all-reduces, pipeline sends and KV transfers.

Used by the planner's latency models. Bandwidths are in gigabytes per second one way, for one GPU's
share. What is hard: a link never reaches the bandwidth of its data sheet, and every message has a
latency. Both are measured with NCCL: Vidur's operator profiles
(github.com/microsoft/vidur at 7d47513, MIT, data/profiling/network/{a100,h100}_dgx), 994 sizes of
2 KB to 64 MB each, fitted by least absolute relative deviation. Mean error over all sizes:
all-reduce over NVLink 11 % (A100) and 10 % (H100), sends over NVLink 15 % and 3 %, sends between
two DGX H100 4 %. TetriInfer's fig. 9 names the kinds: NVLink is its Direct link, InfiniBand its
Direct-NIC, Ethernet through the host its Indirect.
"""

from dataclasses import dataclass
from enum import StrEnum

from cleave.perf.hardware.gpu import Gpu

_BITS_PER_BYTE = 8
USUAL_PCIE_GBPS = 32.0
"""PCIe in GB/s one way where it is not known: 16 lanes of PCIe 4.0, nominally 16 GT/s each."""


class LinkKind(StrEnum):
    """The technology of a link."""

    NVLINK = "NVLink"
    """Also AMD's Infinity Fabric."""
    PCIE = "PCIe"
    INFINIBAND = "InfiniBand"
    """Also RoCE: the network card reads and writes GPU memory itself."""
    ETHERNET = "Ethernet"
    """TCP: bytes go through the host's memory on both sides."""


@dataclass(frozen=True, slots=True)
class LinkEfficiency:
    """What a library or a kernel reaches over a link."""

    start_us: float
    bandwidth_share: float
    """Share of the link's bandwidth that is reached."""


# Measured on DGX A100 (NVLink 3, 300 GB/s). Pooled over 2, 4 and 8 GPUs.
_NVLINK_REDUCE = LinkEfficiency(45.0, 0.55)
_NVLINK_SEND = LinkEfficiency(14.0, 0.80)
# Measured on DGX H100 (NVLink 4, 450 GB/s), whose switches take part in the reduction.
_SWITCHED_REDUCE = LinkEfficiency(25.0, 0.75)
_SWITCHED_SEND = LinkEfficiency(8.0, 0.80)
_SWITCHED_FROM_GB_PER_S = 450.0
# Measured between two DGX H100: 36 of 50 GB/s. The A100 machines' network is not known.
_NETWORK_SEND = LinkEfficiency(13.0, 0.72)
# Not measured: PCIe is assumed to have the network's figures, TCP half of them.
_TCP_SEND = LinkEfficiency(50.0, 0.36)

# vLLM's all-reduce in CUDA graphs, 256 bytes to 1 GiB, over 2, 4 and 8 GPUs (aiconfigurator-core
# 0.12.0, Apache-2.0; median errors 4 to 16 %): A100, H100 and H200; B200 and B300; RTX PRO 6000,
# whose copies go through the host where more than two GPUs take part.
_NVLINK_GRAPH = LinkEfficiency(4.8, 0.68)
_LATEST_GRAPH = LinkEfficiency(7.2, 0.62)
_LATEST_FROM_GB_PER_S = 900.0
_PCIE_PAIR_GRAPH = LinkEfficiency(4.3, 0.59)
_PCIE_GRAPH = LinkEfficiency(13.8, 0.38)
_PAIR = 2
_NCCL_PCIE_START_MS = 0.04
"""Of NCCL without NVLink: between two RTX PRO 6000 (LLMServingSim 2.0, MIT, whose recordings agree)
and, 0.042, over eight RTX 4090 (NVIDIA/nccl issue 1530)."""


@dataclass(frozen=True, slots=True)
class Link:
    """The link from one GPU to another, in one direction."""

    kind: LinkKind
    gb_per_s: float
    """Nominal bandwidth in gigabytes per second."""
    latency_us: float = 0.0
    """Latency of the wire and its switches in microseconds, without the start of a message."""
    all_reduce_gbps: float | None = None
    """Bus bandwidth of all-reduces in GB/s, where it was measured."""

    @property
    def effective_gb_per_s(self) -> float:
        """Bandwidth of a long message."""
        return self.gb_per_s * self._send_efficiency.bandwidth_share

    @property
    def start_ms(self) -> float:
        """Time before the first byte of a message arrives."""
        return (self._send_efficiency.start_us + self.latency_us) / 1e3

    def compute_send_ms(self, size_bytes: float) -> float:
        """Time of one message to one GPU: activations of a pipeline stage, or KV."""
        return self.start_ms + size_bytes / (self.effective_gb_per_s * 1e6)

    def compute_all_reduce_ms(
        self, size_bytes: float, gpus: int, *, in_graphs: bool = False
    ) -> float:
        """Time of an all-reduce of a buffer over `gpus` with one such link each; 0 for one GPU.
        `in_graphs`: as a kernel of a CUDA graph instead of a call of NCCL.

        In a ring each GPU sends the buffer 2 (n - 1) / n times; Aladdin (section 4.1) also scales
        the cost with (N - 1) / N. The start time does not grow with n in Vidur's tables.
        """
        if gpus <= 1:
            return 0.0
        reduce = self._select_graph_reduce(gpus) if in_graphs else self._reduce_efficiency
        moved = 2 * (gpus - 1) / gpus * size_bytes
        if self.all_reduce_gbps is not None:
            return _NCCL_PCIE_START_MS + moved / (self.all_reduce_gbps * 1e6)
        start_ms = (reduce.start_us + self.latency_us) / 1e3
        return start_ms + moved / (self.gb_per_s * reduce.bandwidth_share * 1e6)

    def _select_graph_reduce(self, gpus: int) -> LinkEfficiency:
        match self.kind:
            case LinkKind.NVLINK:
                return _LATEST_GRAPH if self.gb_per_s >= _LATEST_FROM_GB_PER_S else _NVLINK_GRAPH
            case LinkKind.PCIE:
                return _PCIE_PAIR_GRAPH if gpus == _PAIR else _PCIE_GRAPH
            case _:
                return self._reduce_efficiency

    @property
    def _is_switched(self) -> bool:
        return self.gb_per_s >= _SWITCHED_FROM_GB_PER_S

    @property
    def _send_efficiency(self) -> LinkEfficiency:
        match self.kind:
            case LinkKind.NVLINK:
                return _SWITCHED_SEND if self._is_switched else _NVLINK_SEND
            case LinkKind.ETHERNET:
                return _TCP_SEND
            case _:
                return _NETWORK_SEND

    @property
    def _reduce_efficiency(self) -> LinkEfficiency:
        if self.kind is LinkKind.NVLINK:
            return _SWITCHED_REDUCE if self._is_switched else _NVLINK_REDUCE
        return self._send_efficiency


def build_node_link(gpu: Gpu) -> Link:
    """The link between GPUs of one instance in one node: NVLink if the GPU has it, else PCIe."""
    if gpu.nvlink_gbps is not None:
        return Link(LinkKind.NVLINK, gpu.nvlink_gbps)
    return Link(LinkKind.PCIE, gpu.pcie_gbps, all_reduce_gbps=gpu.all_reduce_gbps)


def build_measured_link(gpu: Gpu, gigabits_per_s: float) -> Link:
    """NVLink between engines that copy at a measured rate, at most at what it can do."""
    nominal = gigabits_per_s / _BITS_PER_BYTE / _NVLINK_SEND.bandwidth_share
    return Link(LinkKind.NVLINK, min(nominal, gpu.nvlink_gbps or nominal))


def build_network_link(
    gpu: Gpu, gigabits_per_s: float, latency_us: float, kind: LinkKind = LinkKind.INFINIBAND
) -> Link:
    """The link between GPUs of different nodes, over a network as described in cluster files.
    `gigabits_per_s`: one GPU's share, one way; limited to the bandwidth of the GPU's PCIe."""
    return Link(kind, min(gigabits_per_s / _BITS_PER_BYTE, gpu.pcie_gbps), latency_us)


def build_host_link(gpu: Gpu | None) -> Link:
    """The link from a GPU to the memory of its host; None: of a type that is not known."""
    return Link(LinkKind.PCIE, USUAL_PCIE_GBPS if gpu is None else gpu.pcie_gbps)


def select_slower(one: Link, other: Link) -> Link:
    """The link between GPUs of different types: the slower link with the longer latency."""
    first, second = sorted((one, other), key=lambda link: link.effective_gb_per_s)
    return Link(first.kind, first.gb_per_s, max(first.latency_us, second.latency_us))
