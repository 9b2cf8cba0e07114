"""Links between two engines, over every transport for KV.

Used by both ends of a transfer (`KvServer`, `KvClient`). One-sided links read the peer's memory
without its help; two-sided links (`TwoSidedLink`) need it to send at the same time. Every call
is bounded in seconds. After a LinkError the link is unusable and has to be closed.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch

from cleave_worker.transfer.memory import RangeCopy


class Transport(StrEnum):
    """The transport of the bytes; values are labels of metrics."""

    SHARED_MEMORY = "shared memory"
    CUDA_IPC = "cuda ipc"
    """Between GPUs of one pod."""
    NIXL = "nixl"
    """InfiniBand, RoCE or NVLink, as UCX selects them; TCP if UCX is configured so."""
    GLOO = "gloo"
    """TCP; KV of a GPU goes through pinned host memory."""
    NCCL = "nccl"
    """InfiniBand, RoCE or TCP between GPUs, as NCCL selects them; only if configured."""


class LinkError(OSError):
    """The bytes did not arrive in time or in full; the message is one sentence."""


class OneSidedLink(Protocol):
    """Reads the peer's memory."""

    def read(self, copies: Iterable[RangeCopy], seconds: float) -> None:
        """Copy from remote to local memory. Raises LinkError; local memory may then be partly
        filled, but is never written after the call."""

    def close(self) -> None:
        """Release the peer's memory."""


class PendingMessage(Protocol):
    """A message that is being sent or received."""

    def wait(self, seconds: float) -> None:
        """Wait until its buffer may be used. Raises LinkError or RuntimeError after `seconds`."""


class MessageChannel(Protocol):
    """What a two-sided link sends its messages over, one after the other."""

    device: torch.device
    """Where messages must lie."""

    def send(self, message: torch.Tensor) -> PendingMessage:
        """Start to send a tensor of bytes. Raises LinkError or RuntimeError."""

    def receive(self, message: torch.Tensor) -> PendingMessage:
        """Start to fill a tensor of bytes. Raises LinkError or RuntimeError."""

    def abort(self) -> None:
        """End the channel without waiting for anything; pending messages fail at both ends."""


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
