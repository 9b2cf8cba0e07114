"""One-sided link over NIXL: InfiniBand, RoCE or NVLink, whichever UCX finds between two engines.

A producer registers its regions with an agent and sends their addresses to consumers, whose agents
read them without the producer's engine. Bytes arrive in a staging buffer and are unpacked only
after their transfer has completed, see `StagingBuffers`.
"""

import itertools
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from cleave_worker.transfer.copy_stream import wait_for_copies
from cleave_worker.transfer.memory import ByteRange, Memory, RangeCopy, chunk_ranges, pack_ranges
from cleave_worker.transfer.transport import LinkError, Transport
from cleave_worker.transfer.transports.nixl_agent import (
    NixlAgent,
    XferDescriptor,
    XferHandle,
    XferState,
    is_installed,
)
from cleave_worker.transfer.transports.nixl_buffers import (
    CHUNK_BYTES,
    StagingBuffer,
    StagingBuffers,
)

_log = logging.getLogger(__name__)
_POLL_S = 0.0002
"""Poll interval of a transfer; meanwhile other threads of the engine run."""
_ONE_BYTE = ByteRange(0, 0, 1)
_INFINIBAND_DEVICES = Path("/sys/class/infiniband")
"""RDMA devices, including those for RoCE."""


class NixlMetadata(msgspec.Struct, frozen=True):
    """How a consumer reads a producer's regions."""

    metadata: bytes
    region_addresses: tuple[int, ...]
    device: int


def choose_transports(device: torch.device) -> tuple[Transport, ...]:
    """Return the default transports of this device, best first: docs/decisions/kv-transports.md."""
    has_cards = _INFINIBAND_DEVICES.is_dir() and any(_INFINIBAND_DEVICES.iterdir())
    nixl = (Transport.NIXL,) if has_cards else ()
    if device.type == "cpu":
        return (Transport.SHARED_MEMORY, *nixl, Transport.GLOO)
    # Without a card UCX has nothing for its own messages unless its configuration names TCP.
    is_configured = bool(os.environ.get("UCX_TLS"))
    nixl = nixl or ((Transport.NIXL,) if is_configured else ())
    return (Transport.CUDA_IPC, *nixl, Transport.GLOO)


def filter_installed(transports: Sequence[Transport]) -> tuple[Transport, ...]:
    """Return the transports that can be used on this machine. Raises ValueError when none can."""
    if Transport.NIXL not in transports or is_installed():
        return tuple(transports)
    available = tuple(transport for transport in transports if transport is not Transport.NIXL)
    if not available:
        raise ValueError("transports: nixl is not installed: install it, or name other transports")
    _log.info("NIXL is not installed: KV is transferred over %s", " or ".join(available))
    return available


def make_agent_name(boot_id: str, rank: int) -> str:
    """Return the agent name of a producer's rank."""
    return f"{boot_id}/{rank}"


class RegisteredRegions:
    """A producer's regions, registered with NIXL on the first consumer's request."""

    def __init__(self, name: str, memory: Memory) -> None:
        """`name`: from `make_agent_name`."""
        self._name = name
        self._memory = memory
        self._agent: NixlAgent | None = None
        self._metadata: NixlMetadata | None = None
        self._attempted = False
        self._lock = threading.Lock()

    def get_metadata(self) -> NixlMetadata | None:
        """Return the metadata for consumers; None when NIXL fails here, which is logged once."""
        with self._lock:
            if not self._attempted:
                self._attempted = True
                try:
                    self._metadata = self._register()
                except LinkError as error:
                    _log.warning("KV is not served over NIXL: %s", error)
            return self._metadata

    def _register(self) -> NixlMetadata:
        device = self._memory.device
        self._agent = NixlAgent(self._name, device, use_progress_thread=True)
        descriptors = self._agent.register(self._memory)
        starts = tuple(descriptor.address for descriptor in descriptors)
        return NixlMetadata(self._agent.get_metadata(), starts, descriptors[0].device)


class NixlLink:
    """A OneSidedLink; one thread uses it at a time, any thread may close it."""

    def __init__(
        self,
        local: Memory,
        buffers: StagingBuffers,
        remote: NixlMetadata,
        remote_agent: str,
        seconds: float,
    ) -> None:
        """Read one byte as a test, as loaded metadata does not prove reachability. `remote_agent`:
        the name that the remote agent must have. Raises LinkError."""
        self._local = local
        self._staging_buffers = buffers
        self._remote_metadata = remote
        self.remote_agent = remote_agent
        self.is_closed = False
        self._lock = threading.Lock()
        byte = Memory([torch.empty(1, dtype=torch.uint8, device=local.device)])
        self._agent = buffers.add_remote_agent(remote.metadata, remote_agent)
        self._read(byte, [RangeCopy(_ONE_BYTE, _ONE_BYTE)], seconds)

    def read(self, copies: Iterable[RangeCopy], seconds: float) -> None:
        """Unpack one chunk while the next one arrives. Raises LinkError."""
        self._read(self._local, copies, seconds)

    def close(self) -> None:
        """Remove the remote agent as soon as none of its transfers are pending."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
        self._staging_buffers.remove_remote_agent(self.remote_agent)

    def describe(self, span: ByteRange) -> XferDescriptor:
        """Describe a remote range to NIXL."""
        start = self._remote_metadata.region_addresses[span.region]
        return XferDescriptor(start + span.offset, span.length, self._remote_metadata.device)

    def _read(self, target: Memory, copies: Iterable[RangeCopy], seconds: float) -> None:
        with self._acquire_buffer(time.monotonic() + seconds) as lease:
            pending: tuple[XferHandle, int, list[ByteRange]] | None = None
            for number, (remote, local) in enumerate(_chunk_copies(copies)):
                half = number % 2
                handle = lease.post(self._agent, half, remote)
                if pending:
                    lease.unpack(target, *pending)
                pending = (handle, half, local)
            if pending:
                lease.unpack(target, *pending)

    @contextmanager
    def _acquire_buffer(self, deadline: float) -> Iterator["_BufferLease"]:
        """Provide a buffer for one transfer; a link whose transfer fails is closed."""
        try:
            buffer = self._staging_buffers.acquire(self.remote_agent, deadline)
            lease = _BufferLease(self, buffer, deadline)
            try:
                yield lease
            finally:
                self._staging_buffers.release(buffer, lease.handles, self.remote_agent)
        except (LinkError, ValueError, IndexError, RuntimeError) as error:
            self.close()
            raise LinkError(f"over NIXL: {error}") from error


class _BufferLease:
    """A buffer and the pending transfers of its two halves."""

    def __init__(self, link: NixlLink, buffer: StagingBuffer, deadline: float) -> None:
        self._link = link
        self._buffer = buffer
        self._deadline = deadline
        self.handles: list[XferHandle] = []
        """Transfers that may not have completed."""

    def post(self, agent: NixlAgent, half: int, remote: Sequence[ByteRange]) -> XferHandle:
        """Start a transfer from remote ranges to one half."""
        local = [self._buffer.describe(range_) for range_ in _list_buffer_ranges(remote, half)]
        described = [self._link.describe(span) for span in remote]
        handle = agent.read(self._link.remote_agent, local, described)
        self.handles.append(handle)
        return handle

    def wait(self, handle: XferHandle) -> None:
        """Wait until a transfer has completed. Raises LinkError."""
        while (state := handle.poll()) is XferState.IN_PROGRESS:
            if self._link.is_closed:
                raise LinkError("the link was closed")
            if time.monotonic() > self._deadline:
                raise LinkError("the transfer did not complete in time")
            time.sleep(_POLL_S)
        if state is XferState.FAILED:
            raise LinkError("the peer cannot be reached any more")
        self.handles.remove(handle)

    def unpack(
        self, target: Memory, handle: XferHandle, half: int, local: Sequence[ByteRange]
    ) -> None:
        """Wait for a chunk and copy it to its destination."""
        self.wait(handle)
        pairs = zip(local, _list_buffer_ranges(local, half), strict=True)
        target.copy_from(self._buffer.memory, pairs)
        # Before this half is filled again and before the engine reads the KV.
        wait_for_copies(target.device)


def _list_buffer_ranges(ranges: Sequence[ByteRange], half: int) -> list[ByteRange]:
    return pack_ranges(ranges, half * CHUNK_BYTES)


def _chunk_copies(copies: Iterable[RangeCopy]) -> Iterator[tuple[list[ByteRange], list[ByteRange]]]:
    """Yield chunks as (remote ranges, local ranges)."""
    remote, local = itertools.tee(copies)
    return zip(
        chunk_ranges((move.remote for move in remote), CHUNK_BYTES),
        chunk_ranges((move.local for move in local), CHUNK_BYTES),
        strict=True,
    )
