"""One-sided link between GPUs of one pod: the consumer maps the producer's memory by CUDA IPC.

A producer exports a handle for each allocation that contains KV, to consumers in its own PID and
IPC namespaces. A consumer opens them and gathers the blocks with kernels of its own, on the stream
of its thread; the producer's engine takes no part. Only the driver knows whether two GPUs can reach
each other, as a process does not see its neighbour's GPU: then a handle cannot be opened.

A kernel cannot be cancelled. So bytes are gathered into a buffer, and leave it only when the kernel
has ended in time; otherwise buffer and mapping are kept for ever. Memory of a producer that has
died stays allocated while it is mapped, so links to it have to be closed.
"""

import ctypes
import functools
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch

from cleave_worker.transfer.copy_stream import record_event, wait_for_copies
from cleave_worker.transfer.memory import ByteRange, Memory, RangeCopy, copy_rows, cut_copies
from cleave_worker.transfer.transport import LinkError
from cleave_worker.transfer.transports.cuda_stream import call_runtime

_log = logging.getLogger(__name__)
_BUFFER_BYTES = 16 << 20
"""Of each link; a link has one transfer at a time."""
_POLL_S = 0.00005
_NONCE_BYTES = 32
_HANDLE_BYTES = 64
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_LAZY_ENABLE_PEER_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess."""


class ExportedRegion(msgspec.Struct, frozen=True):
    """Where a region lies in an allocation."""

    handle: bytes
    """Of the allocation; whoever opens it may read and write all of it."""
    offset: int
    size: int


class ExportedMemory(msgspec.Struct, frozen=True):
    """A producer's regions, and a further one that contains `nonce`."""

    regions: tuple[ExportedRegion, ...]
    nonce: bytes
    """Random bytes of this start of the producer: a mapping without them is of other memory."""


class MappingCalls(Protocol):
    """What maps memory of other processes. Every call raises LinkError."""

    def export(self, region: torch.Tensor) -> ExportedRegion:
        """Describe a region to other processes."""

    def open(self, handle: bytes) -> int:
        """Map an allocation; return its address in this process. One that is mapped already has
        the same address, and must be closed as often as it was opened."""

    def close(self, address: int) -> None:
        """Unmap an allocation. Nothing may use it any more."""


class CudaMappingCalls:
    """The calls of the CUDA runtime for one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def export(self, region: torch.Tensor) -> ExportedRegion:
        """Fails for memory that was not allocated by cudaMalloc."""
        base, size = ctypes.c_void_p(), ctypes.c_size_t()
        at = ctypes.c_void_p(region.data_ptr())
        handle = _Handle()
        with torch.cuda.device(self._device):
            found = _load_driver().cuMemGetAddressRange_v2(
                ctypes.byref(base), ctypes.byref(size), at
            )
            if found:
                raise LinkError(f"cuMemGetAddressRange returned error {found}")
            try:
                call_runtime("cudaIpcGetMemHandle", ctypes.byref(handle), base)
            except LinkError as error:
                raise LinkError(
                    f"{error}: KV has no handle with expandable segments "
                    "(PYTORCH_CUDA_ALLOC_CONF) or vLLM's sleep mode"
                ) from error
        offset = region.data_ptr() - (base.value or 0)
        return ExportedRegion(bytes(handle.reserved), offset, region.numel())

    def open(self, handle: bytes) -> int:
        """Fails where the GPUs have no peer access. The driver counts how often it was opened."""
        address = ctypes.c_void_p()
        opened = _Handle.from_buffer_copy(handle)
        flags = ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
        with torch.cuda.device(self._device):
            call_runtime("cudaIpcOpenMemHandle", ctypes.byref(address), opened, flags)
        return address.value or 0

    def close(self, address: int) -> None:
        """Unmap once."""
        with torch.cuda.device(self._device):
            call_runtime("cudaIpcCloseMemHandle", ctypes.c_void_p(address))


class _Handle(ctypes.Structure):
    """cudaIpcMemHandle_t."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


@functools.cache
def _load_driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise LinkError(f"the CUDA driver cannot be loaded: {error}") from error


def find_calls(device: torch.device) -> MappingCalls | None:
    """Return the calls that map memory of a device; None: it is not mapped by CUDA IPC."""
    is_cuda = device.type == "cuda" and torch.version.cuda is not None
    return CudaMappingCalls(device) if is_cuda else None


@functools.cache
def find_place() -> str:
    """Identify this machine's start and the namespaces of this process. Processes in one container
    have the same; CUDA IPC does not work across them. Empty: the kernel does not say."""
    try:
        boot = _BOOT_ID.read_text().strip()
        return "/".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "ipc"))])
    except OSError:
        return ""


def is_here(place: str) -> bool:
    """Whether a peer at `place` (empty: not known) is in this container."""
    return bool(place) and place == find_place()


class MemoryExport:
    """A producer's regions, exported on the first consumer's request."""

    def __init__(self, memory: Memory, calls: MappingCalls) -> None:
        self._memory = memory
        self._calls = calls
        self._nonce = secrets.token_bytes(_NONCE_BYTES)
        # Exported like KV; kept as long as it may be read.
        self._nonce_region = torch.tensor([*self._nonce], dtype=torch.uint8, device=memory.device)
        self._exported: ExportedMemory | None = None
        self._attempted = False
        self._lock = threading.Lock()

    def get(self) -> ExportedMemory | None:
        """Return what consumers open; None when that fails here, which is logged once."""
        with self._lock:
            if not self._attempted:
                self._attempted = True
                try:
                    regions = (*self._memory.regions, self._nonce_region)
                    exported = tuple(map(self._calls.export, regions))
                    self._exported = ExportedMemory(exported, self._nonce)
                except LinkError as error:
                    _log.warning("KV is not served over CUDA IPC: %s", error)
            return self._exported


class CudaIpcLink:
    """A OneSidedLink over mapped GPU memory; one thread uses it at a time, any may close it."""

    def __init__(
        self, local: Memory, remote: ExportedMemory, calls: MappingCalls, seconds: float
    ) -> None:
        """Map the peer's regions and read its nonce. Raises LinkError."""
        self._local = local
        self._calls = calls
        self._opened: dict[bytes, int] = {}
        self._is_closed = self._is_stuck = False
        self._lock = threading.Lock()
        self._buffer = Memory([_allocate(_BUFFER_BYTES, local.device)])
        try:
            self._remote = Memory([self._map(region) for region in remote.regions])
            self._check_nonce(remote.nonce, seconds)
        except BaseException:
            self.close()
            raise

    def read(self, copies: Iterable[RangeCopy], seconds: float) -> None:
        """Gather a piece and unpack it, one after the other. Raises LinkError."""
        self._read(self._local, copies, seconds)

    def close(self) -> None:
        """Unmap the peer's memory, or let a read that still runs do so at its end."""
        self._is_closed = True
        self._release_mappings()

    def _map(self, region: ExportedRegion) -> torch.Tensor:
        """A tensor on mapped memory. It has the own device, which reaches the peer's."""
        if region.handle not in self._opened:
            self._opened[region.handle] = self._calls.open(region.handle)
        address, device = self._opened[region.handle] + region.offset, self._local.device
        storage = torch._C._construct_storage_from_data_pointer(address, device, region.size)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

    def _check_nonce(self, nonce: bytes, seconds: float) -> None:
        found = Memory([_allocate(len(nonce), self._local.device)])
        own, last = ByteRange(0, 0, len(nonce)), len(self._remote.regions) - 1
        self._read(found, [RangeCopy(ByteRange(last, 0, len(nonce)), own)], seconds)
        if not secrets.compare_digest(bytes(found.copy_to_host(own)), nonce):
            raise LinkError("the mapped memory is not the peer's")

    def _read(self, target: Memory, copies: Iterable[RangeCopy], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        try:
            with self._lock:
                for remote, packed, local in cut_copies(copies, _BUFFER_BYTES):
                    if self._is_closed:
                        raise LinkError("the link was closed")
                    copy_rows(self._buffer, self._remote, np.stack((packed, remote), axis=1))
                    self._wait(deadline)
                    copy_rows(target, self._buffer, np.stack((local, packed), axis=1))
                # Before the engine reads the KV.
                wait_for_copies(target.device)
        except ValueError as error:
            raise LinkError(str(error)) from error
        except RuntimeError as error:
            # Of CUDA, for instance when no memory is left: a kernel may still run.
            self._abandon()
            raise LinkError(str(error)) from error
        finally:
            if self._is_closed:
                self._release_mappings()

    def _wait(self, deadline: float) -> None:
        """Wait until the buffer is filled. Raises LinkError."""
        event = record_event(self._local.device)
        while event is not None and not event.query():
            if time.monotonic() > deadline:
                self._abandon()
                raise LinkError("the peer's memory was not read in time")
            time.sleep(_POLL_S)

    def _abandon(self) -> None:
        """Keep buffer and mappings for ever, as a kernel may still run."""
        self._is_stuck = self._is_closed = True
        _stuck.append(self)

    def _release_mappings(self) -> None:
        if self._is_stuck or not self._lock.acquire(blocking=False):
            return
        try:
            while self._opened:
                self._calls.close(self._opened.popitem()[1])
        except LinkError as error:
            _log.warning("a peer's memory stays mapped: %s", error)
        finally:
            self._lock.release()


_stuck: list[CudaIpcLink] = []
"""Links whose last kernel may still run."""


def _allocate(size: int, device: torch.device) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise LinkError(f"no buffer of {size} bytes: {error}") from error
