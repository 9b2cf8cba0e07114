"""Links between two engines: one interface over every transport for KV.

Used by both ends of a transfer (`KvServer`, `KvClient`). One-sided links read and write the peer's
memory without its help; two-sided links need it to send or receive at the same time. Every call is
bounded in seconds. After a LinkError the link is unusable and has to be closed.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from cleave_worker.transfer.memory import ByteRange, RangeCopy


class Transport(StrEnum):
    """The transport of the bytes; values are labels of metrics."""

    SHARED_MEMORY = "shared memory"
    NIXL = "nixl"
    """InfiniBand, RoCE or NVLink, as UCX selects them; TCP if UCX is configured so."""
    GLOO = "gloo"
    """TCP, between hosts without GPUs."""
    NCCL = "nccl"
    """NVLink, InfiniBand, RoCE or TCP, as NCCL selects them."""


class LinkError(OSError):
    """The bytes did not arrive in time or in full; the message is one sentence."""


class OneSidedLink(Protocol):
    """Reads and writes the peer's memory."""

    transport: Transport

    def read(self, copies: Iterable[RangeCopy], seconds: float) -> None:
        """Copy from remote to local memory. Raises LinkError; local memory may then be partly
        filled, but is never written after the call."""

    def write(self, copies: Iterable[RangeCopy], seconds: float) -> None:
        """Copy from local to remote memory. Raises LinkError; bytes may then still arrive at the
        peer."""

    def close(self) -> None:
        """Release the peer's memory."""


class TwoSidedLink(Protocol):
    """Transfers bytes when both ends take part; the ranges of both ends have equal lengths in
    total."""

    transport: Transport

    def send(self, spans: Iterable[ByteRange], seconds: float) -> None:
        """Send the bytes of local ranges in their order. Raises LinkError."""

    def receive(self, spans: Iterable[ByteRange], seconds: float) -> None:
        """Fill local ranges. Raises LinkError; they may then be partly filled, but are never
        written after the call."""

    def close(self) -> None:
        """Close the connection; the peer's pending calls fail."""


@dataclass(slots=True)
class BandwidthMeter:
    """Bytes transferred over a link, and the time that took."""

    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Measured bandwidth; 0 before the first transfer."""
        return self.num_bytes / self.seconds if self.seconds else 0.0

    @contextmanager
    def measure(self, num_bytes: int) -> Iterator[None]:
        """Count a transfer, unless it raises."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started
        self.num_bytes += num_bytes
