"""One-sided link between processes of one host: the consumer maps the producer's memory.

The producer moves its regions into shared memory once. A peer that can see its process (same user,
same process namespace) maps them and copies at memory speed. Process ids and file descriptors are
reused, so an opened file is used only if device, inode and size match the announced ones.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec
import numpy as np
import torch

from cleave_worker.transfer.memory import Memory, RangeCopy
from cleave_worker.transfer.transport import LinkError


class SharedRegion(msgspec.Struct, frozen=True):
    """Where a peer can open a region: /proc/`pid`/fd/`fd`."""

    pid: int
    fd: int
    device: int
    inode: int
    size: int


def share_memory(memory: Memory) -> tuple[SharedRegion, ...]:
    """Move regions into shared memory, in place: tensors on them keep their contents.

    Returns () when that is impossible: GPU memory, or more than /dev/shm has free. Must be called
    before any address of the regions is used.
    """
    if any(region.device.type != "cpu" for region in memory.regions):
        return ()
    if sum(region.untyped_storage().nbytes() for region in memory.regions) > _get_free_bytes():
        return ()
    return tuple(_share_region(region) for region in memory.regions)


def _share_region(region: torch.Tensor) -> SharedRegion:
    file, size = region.untyped_storage()._share_fd_cpu_()
    status = os.fstat(file)
    return SharedRegion(os.getpid(), file, status.st_dev, status.st_ino, size)


def _get_free_bytes() -> int:
    try:
        filesystem = os.statvfs("/dev/shm")  # noqa: S108
    except OSError:
        return 0
    return filesystem.f_bavail * filesystem.f_frsize


class SharedMemoryLink:
    """A OneSidedLink over mapped memory."""

    def __init__(self, local: Memory, remote_regions: Sequence[SharedRegion]) -> None:
        """Map the peer's regions. Raises LinkError when this process cannot open them."""
        self._local = local
        self._maps: list[mmap.mmap] = []
        try:
            self._maps.extend(map(_map_region, remote_regions))
        except OSError as error:
            self.close()
            raise LinkError(f"the peer's memory cannot be mapped: {error}") from error
        self._remote = Memory(list(map(_to_tensor, self._maps)))

    def read(self, copies: Iterable[RangeCopy], seconds: float) -> None:  # noqa: ARG002
        """Copy from remote to local memory; needs no time limit, as memory does not block."""
        remote = self._remote  # Keeps the mapping during the copy, even if the link is closed.
        try:
            self._local.copy_from(remote, ((local, remote_range) for remote_range, local in copies))
        except ValueError as error:
            raise LinkError(str(error)) from error

    def close(self) -> None:
        """Release the peer's memory."""
        self._remote = Memory([])
        for mapping in self._maps:
            # A copy that still runs unmaps it at its end.
            with suppress(BufferError):
                mapping.close()
        self._maps = []


def _map_region(region: SharedRegion) -> mmap.mmap:
    file = os.open(f"/proc/{region.pid}/fd/{region.fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        expected = (region.device, region.inode, region.size)
        if (status.st_dev, status.st_ino, status.st_size) != expected:
            raise OSError("the file descriptor refers to another file")
        return mmap.mmap(file, region.size, access=mmap.ACCESS_READ)
    finally:
        os.close(file)


def _to_tensor(mapping: mmap.mmap) -> torch.Tensor:
    """A tensor on a mapping, which nothing may write. It keeps the mapping open."""
    view = np.frombuffer(mapping, np.uint8)
    # torch has no read-only tensors and warns of every buffer that is.
    array = (ctypes.c_uint8 * len(mapping)).from_address(view.ctypes.data)
    array.view = view  # type: ignore[attr-defined]
    return torch.frombuffer(array, dtype=torch.uint8)
