"""Links between two engines, over every transport for KV.

Used by both ends of a transfer (`KvServer`, `KvClient`). One-sided links read the peer's memory
without its help; two-sided links (`ProcessGroupLink`) need it to send at the same time. Every call
is bounded in seconds. After a LinkError the link is unusable and has to be closed.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from cleave_worker.transfer.memory import RangeCopy


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
    """Reads the peer's memory."""

    def read(self, copies: Iterable[RangeCopy], seconds: float) -> None:
        """Copy from remote to local memory. Raises LinkError; local memory may then be partly
        filled, but is never written after the call."""

    def close(self) -> None:
        """Release the peer's memory."""


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
