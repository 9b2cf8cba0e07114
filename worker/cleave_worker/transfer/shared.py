"""One-sided link between processes of one host: the owner's memory, mapped by the reader.

The owner moves its regions into shared memory once; a peer that may see its process (same user,
same process namespace) maps them and copies at the speed of memory. What is hard: process ids and
file numbers are used again, so what was opened counts only if it is the very file that was named.
"""

import mmap
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec
import torch

from cleave_worker.transfer.link import LinkError, Way
from cleave_worker.transfer.memory import Memory, Move


class SharedRegion(msgspec.Struct, frozen=True):
    """Where a peer finds a region."""

    pid: int
    file: int
    device: int
    inode: int
    size: int


def share(memory: Memory) -> tuple[SharedRegion, ...]:
    """Move regions into shared memory, in place: every tensor on them sees the same bytes.

    Empty when it cannot be done: memory of a GPU, or more of it than this host can share.
    To be called before the regions' addresses are used by anybody.
    """
    if any(region.device.type != "cpu" for region in memory.regions):
        return ()
    needed = sum(region.untyped_storage().nbytes() for region in memory.regions)
    if needed > _free_bytes():
        return ()
    return tuple(_share(region) for region in memory.regions)


def _share(region: torch.Tensor) -> SharedRegion:
    file, size = region.untyped_storage()._share_fd_cpu_()
    told = os.fstat(file)
    return SharedRegion(os.getpid(), file, told.st_dev, told.st_ino, size)


def _free_bytes() -> int:
    try:
        room = os.statvfs("/dev/shm")  # noqa: S108
    except OSError:
        return 0
    return room.f_bavail * room.f_frsize


class SharedMemory:
    """A OneSided link."""

    way = Way.SHARED_MEMORY

    def __init__(self, local: Memory, theirs: Sequence[SharedRegion]) -> None:
        """Map the peer's regions. Raises LinkError when they cannot be reached from here."""
        self._local = local
        self._maps: list[mmap.mmap] = []
        try:
            for region in theirs:
                self._maps.append(_map(region))
        except OSError as error:
            self.close()
            raise LinkError(f"the peer's memory cannot be mapped: {error}") from error
        self._remote = Memory([torch.frombuffer(one, dtype=torch.uint8) for one in self._maps])

    def read(self, moves: Iterable[Move], seconds: float) -> None:  # noqa: ARG002
        """Copy from there to here; memory does not keep anybody waiting."""
        remote = self._remote  # Keeps the mapping while bytes are copied, whoever closes the link.
        try:
            self._local.fill(remote, ((here, there) for there, here in moves))
        except ValueError as error:
            raise LinkError(str(error)) from error

    def write(self, moves: Iterable[Move], seconds: float) -> None:  # noqa: ARG002
        """Copy from here to there."""
        remote = self._remote
        try:
            remote.fill(self._local, moves)
        except ValueError as error:
            raise LinkError(str(error)) from error

    def close(self) -> None:
        """Let go of the peer's memory."""
        self._remote = Memory([])
        for one in self._maps:
            # Whoever still looks at it unmaps it with the last look.
            with suppress(BufferError):
                one.close()
        self._maps = []


def _map(region: SharedRegion) -> mmap.mmap:
    file = os.open(f"/proc/{region.pid}/fd/{region.file}", os.O_RDWR | os.O_CLOEXEC)
    try:
        told = os.fstat(file)
        if (told.st_dev, told.st_ino, told.st_size) != (region.device, region.inode, region.size):
            raise OSError("another file has its place")
        return mmap.mmap(file, region.size)
    finally:
        os.close(file)
