"""Links between GPUs: all-reduce, pipeline sends, and the hand-off's raw material.

Used by the planner's latency models. Bandwidths are in gigabytes per second one way, for one GPU's
share. What is hard: a link never gives what its data sheet says, and a message costs something
before its first byte. Both are measured with NCCL: Vidur's operator profiles
(github.com/microsoft/vidur at 7d47513, MIT, data/profiling/network/{a100,h100}_dgx), 994 sizes of
2 KB to 64 MB each, fitted by least absolute relative deviation. Mean error over all sizes:
all-reduce over NVLink 11 % (A100) and 10 % (H100), sends over NVLink 15 % and 3 %, sends between
two DGX H100 4 %. TetriInfer's fig. 9 names the kinds: NVLink is its Direct link, InfiniBand its
Direct-NIC, Ethernet through the host its Indirect.
"""

from dataclasses import dataclass
from enum import StrEnum

from cleave.perf.gpu import Gpu

_BITS = 8


class LinkKind(StrEnum):
    """What carries the bytes."""

    NVLINK = "NVLink"
    """Also AMD's Infinity Fabric."""
    PCIE = "PCIe"
    INFINIBAND = "InfiniBand"
    """Also RoCE: the network card reads and writes GPU memory itself."""
    ETHERNET = "Ethernet"
    """TCP: bytes pass the host's memory on both sides."""


@dataclass(frozen=True, slots=True)
class _Collective:
    """What NCCL gets out of a link."""

    start_us: float
    share: float
    """Of the link's bandwidth."""


# Measured on DGX A100 (NVLink 3, 300 GB/s). Pooled over 2, 4 and 8 GPUs.
_NVLINK_REDUCE = _Collective(45.0, 0.55)
_NVLINK_SEND = _Collective(14.0, 0.80)
# Measured on DGX H100 (NVLink 4, 450 GB/s), whose switches take part in the reduction.
_SWITCHED_REDUCE = _Collective(25.0, 0.75)
_SWITCHED_SEND = _Collective(8.0, 0.80)
_SWITCHED_FROM_GB_PER_S = 450.0
# Measured between two DGX H100: 36 of 50 GB/s. The A100 machines' network is not known.
_NETWORK_SEND = _Collective(13.0, 0.72)
# Not measured: PCIe gets the network's figures, TCP half of them.
_TCP_SEND = _Collective(50.0, 0.36)


@dataclass(frozen=True, slots=True)
class Link:
    """One GPU's way to another, one direction."""

    kind: LinkKind
    gb_per_s: float
    """Nominal, in gigabytes."""
    latency_us: float = 0.0
    """Of the wire and its switches, in microseconds; starting a message comes on top."""

    @property
    def effective_gb_per_s(self) -> float:
        """What a long message gets."""
        return self.gb_per_s * self._send.share

    @property
    def start_ms(self) -> float:
        """What a message costs before its first byte arrives."""
        return (self._send.start_us + self.latency_us) / 1e3

    def send_ms(self, size_bytes: float) -> float:
        """One message to one GPU: a pipeline's activations, a block of KV."""
        return self.start_ms + size_bytes / (self.effective_gb_per_s * 1e6)

    def all_reduce_ms(self, size_bytes: float, gpus: int) -> float:
        """Sum of a buffer over `gpus`, each with one such link; 0 for one GPU.

        In a ring each GPU sends the buffer 2 (n - 1) / n times; Aladdin (section 4.1) scales the
        cost with (N - 1) / N likewise. The cost of starting does not grow with n in the tables.
        """
        if gpus <= 1:
            return 0.0
        reduce = self._reduce
        moved = 2 * (gpus - 1) / gpus * size_bytes
        start_ms = (reduce.start_us + self.latency_us) / 1e3
        return start_ms + moved / (self.gb_per_s * reduce.share * 1e6)

    @property
    def _is_switched(self) -> bool:
        return self.gb_per_s >= _SWITCHED_FROM_GB_PER_S

    @property
    def _send(self) -> _Collective:
        match self.kind:
            case LinkKind.NVLINK:
                return _SWITCHED_SEND if self._is_switched else _NVLINK_SEND
            case LinkKind.ETHERNET:
                return _TCP_SEND
            case _:
                return _NETWORK_SEND

    @property
    def _reduce(self) -> _Collective:
        if self.kind is LinkKind.NVLINK:
            return _SWITCHED_REDUCE if self._is_switched else _NVLINK_REDUCE
        return self._send


def within_node(gpu: Gpu) -> Link:
    """Between GPUs of one node: NVLink where there is one, otherwise PCIe.

    For the GPUs of one instance. Between instances only where one process may map the other's GPU
    memory (CUDA IPC), which takes a shared PID namespace; pods have one each.
    """
    if gpu.nvlink_gbps is not None:
        return Link(LinkKind.NVLINK, gpu.nvlink_gbps)
    return Link(LinkKind.PCIE, gpu.pcie_gbps)


def between_nodes(
    gpu: Gpu, gigabits_per_s: float, latency_us: float, kind: LinkKind = LinkKind.INFINIBAND
) -> Link:
    """Between GPUs of different nodes, of a network as cluster files state it.

    `gigabits_per_s` is one GPU's share, one way; no faster than the GPU's PCIe.
    """
    return Link(kind, min(gigabits_per_s / _BITS, gpu.pcie_gbps), latency_us)


def slower(one: Link, other: Link) -> Link:
    """The way between unlike GPUs: the slower of the two sides' links, the longer latency."""
    first, second = sorted((one, other), key=lambda link: link.effective_gb_per_s)
    return Link(first.kind, first.gb_per_s, max(first.latency_us, second.latency_us))
