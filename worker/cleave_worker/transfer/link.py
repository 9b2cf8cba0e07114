"""Links between two engines: one interface over every way that KV can take.

Used by the two ends of a hand-off (owner.py, reader.py). One-sided links read and write the peer's
memory without its help, two-sided ones need it to send or receive at the same time. Every call has
a bound in seconds; after a LinkError the link is of no use and is closed.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from cleave_worker.transfer.memory import Move, Span


class Way(StrEnum):
    """What carries the bytes."""

    SHARED_MEMORY = "shared memory"
    NIXL = "nixl"
    """InfiniBand, RoCE or NVLink, as UCX finds them; TCP if it is told to."""
    GLOO = "gloo"
    """TCP, between hosts without GPUs."""
    NCCL = "nccl"
    """NVLink, InfiniBand, RoCE or TCP, as NCCL finds them."""


class LinkError(OSError):
    """Bytes did not move in time or in full; one sentence."""


class OneSided(Protocol):
    """Reaches into the peer's memory."""

    way: Way

    def read(self, moves: Iterable[Move], seconds: float) -> None:
        """Copy from there to here. Raises LinkError, and leaves own memory as it was or partly
        filled, but never touches it after it has returned."""

    def write(self, moves: Iterable[Move], seconds: float) -> None:
        """Copy from here to there. Raises LinkError; bytes may then still come there."""

    def close(self) -> None:
        """Let go of the peer's memory."""


class TwoSided(Protocol):
    """Moves bytes when both ends take part; spans of both are of the same lengths in total."""

    way: Way

    def send(self, spans: Iterable[Span], seconds: float) -> None:
        """Give the bytes of own spans, in their order. Raises LinkError."""

    def receive(self, spans: Iterable[Span], seconds: float) -> None:
        """Fill own spans, once all bytes are there. Raises LinkError and leaves them as they were
        or partly filled, but never touches them after it has returned."""

    def close(self) -> None:
        """Break the connection; what the peer waits for ends with an error."""


@dataclass(slots=True)
class Meter:
    """What has gone over a link, and how fast."""

    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Measured bandwidth; 0 before the first transfer."""
        return self.num_bytes / self.seconds if self.seconds else 0.0

    @contextmanager
    def measure(self, num_bytes: int) -> Iterator[None]:
        """Count a transfer that ends well."""
        begun = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - begun
        self.num_bytes += num_bytes
