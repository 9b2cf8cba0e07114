"""Staging buffers into which a consumer receives bytes over NIXL, shared by all its links.

NIXL cannot cancel a transfer: one that was abandoned may still write until it completes. Until then
its buffer must not be used for anything else. A buffer is therefore reused only when all transfers
into it are known to have completed. A buffer whose transfers failed is never reused, and when all
buffers are lost this way no transfer over NIXL starts any more.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from cleave_worker.transfer.memory import ByteRange, Memory
from cleave_worker.transfer.transport import LinkError
from cleave_worker.transfer.transports.nixl_agent import (
    NixlAgent,
    XferDescriptor,
    XferHandle,
    XferState,
)

_log = logging.getLogger(__name__)
CHUNK_BYTES = 8 << 20
"""Bytes per transfer: enough for the full rate."""
_NUM_HALVES = 2
"""One half is unpacked while the other fills."""
_MAX_BUFFERS = 16
"""256 MiB in total; further transfers wait for a free buffer."""
_POLL_S = 0.01
"""Interval at which waiting threads poll the abandoned transfers."""


@dataclass(frozen=True, slots=True)
class StagingBuffer:
    """A buffer that one transfer of a link uses at a time."""

    memory: Memory
    _descriptor: XferDescriptor

    def describe(self, span: ByteRange) -> XferDescriptor:
        """Describe a range of the buffer to NIXL."""
        start, _, device = self._descriptor
        return XferDescriptor(start + span.offset, span.length, device)


@dataclass(frozen=True, slots=True)
class _BusyBuffer:
    """A returned buffer into which transfers may still write."""

    buffer: StagingBuffer
    handles: tuple[XferHandle, ...]
    remote_agent: str


class StagingBuffers:
    """The buffers of a consumer and their NIXL agent; created on first use."""

    def __init__(self, name: str, device: torch.device) -> None:
        """`name`: unique among the agents of all engines."""
        self._name = name
        self._device = device
        self._agent: NixlAgent | None = None
        self._fault = ""
        self._free: list[StagingBuffer] = []
        self._busy: list[_BusyBuffer] = []
        self._quarantined: list[StagingBuffer] = []
        self._num_allocated = 0
        self._uses: Counter[str] = Counter()
        self._changed = threading.Condition()

    def add_remote_agent(self, metadata: bytes, name: str) -> NixlAgent:
        """Return an agent that knows this peer until `remove_remote_agent`. Raises LinkError."""
        with self._changed:
            agent = self._agent = self._agent or self._create_agent()
            loaded = agent.add_remote_agent(metadata)
            if loaded == name:
                self._uses[name] += 1
                return agent
            if not self._uses[loaded]:
                agent.remove_remote_agent(loaded)
        raise LinkError(f"the producer's agent is {loaded!r}, not {name!r}")

    def remove_remote_agent(self, name: str) -> None:
        """End one use of a peer's agent, which is removed after the last use."""
        with self._changed:
            self._drop_remote_agent(name)

    def acquire(self, peer: str, deadline: float) -> StagingBuffer:
        """Return a buffer for one transfer; the caller must `release` it. Raises LinkError."""
        with self._changed:
            while True:
                self._reclaim()
                buffer = self._free.pop() if self._free else self._allocate()
                if buffer:
                    self._uses[peer] += 1
                    return buffer
                if len(self._busy) + len(self._quarantined) == _MAX_BUFFERS:
                    raise LinkError(
                        f"all {_MAX_BUFFERS} buffers belong to transfers that have not completed"
                    )
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise LinkError("no buffer became free in time")
                self._changed.wait(min(remaining, _POLL_S) if self._busy else remaining)

    def release(self, buffer: StagingBuffer, handles: Iterable[XferHandle], peer: str) -> None:
        """Return a buffer after use; `handles`: all transfers that may not have completed."""
        with self._changed:
            self._busy.append(_BusyBuffer(buffer, tuple(handles), peer))
            self._reclaim()

    def _create_agent(self) -> NixlAgent:
        """Create the agent; a failure is remembered, not retried. Raises LinkError."""
        if self._fault:
            raise LinkError(self._fault)
        try:
            return NixlAgent(self._name, self._device, use_progress_thread=False)
        except LinkError as error:
            self._fault = str(error)
            raise

    def _reclaim(self) -> None:
        """Free the buffers whose transfers have completed."""
        busy: list[_BusyBuffer] = []
        for entry in self._busy:
            states = [handle.poll() for handle in entry.handles]
            if XferState.IN_PROGRESS in states:
                busy.append(entry)
                continue
            self._drop_remote_agent(entry.remote_agent)
            if XferState.FAILED in states:
                self._quarantined.append(entry.buffer)
                fault = f"its buffer is not reused ({len(self._quarantined)} of {_MAX_BUFFERS})"
                _log.warning("a transfer from %s failed: %s", entry.remote_agent, fault)
            else:
                self._free.append(entry.buffer)
            self._changed.notify()
        self._busy = busy
        # Keeps the buffers alive while they may be written, even if the consumer is garbage.
        (_pinned.add if busy or self._quarantined else _pinned.discard)(self)

    def _allocate(self) -> StagingBuffer | None:
        if self._num_allocated == _MAX_BUFFERS:
            return None
        assert self._agent, "no remote agent was added"
        size = _NUM_HALVES * CHUNK_BYTES
        memory = Memory([torch.empty(size, dtype=torch.uint8, device=self._device)])
        (descriptor,) = self._agent.register(memory)
        self._num_allocated += 1
        return StagingBuffer(memory, descriptor)

    def _drop_remote_agent(self, name: str) -> None:
        self._uses[name] -= 1
        if not self._uses[name] and self._agent:
            del self._uses[name]
            self._agent.remove_remote_agent(name)


_pinned: set[StagingBuffers] = set()
