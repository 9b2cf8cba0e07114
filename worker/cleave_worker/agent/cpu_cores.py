"""Chooses the CPU cores of the engine and locks them against other engines.

Called by main before anything else starts. Two vLLM CPU servers on one core hang, so each core has
a lock file that the kernel unlocks when the process ends in any way.
"""

import errno
import fcntl
import os
import stat
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cleave.shm.core_locks import describe_holder, get_lock_file

Cores = frozenset[int]


class CoresError(RuntimeError):
    """The engine cannot have the cores; the message names the core, its owner and a remedy."""


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """Cores to lock: all of `cores`, or any `count` free ones of them."""

    cores: tuple[int, ...]
    count: int | None = None
    """None: all of `cores`."""


def parse(text: str) -> tuple[int, ...]:
    """Parse `0,2-3` to (0, 2, 3). Raises CoresError."""
    cores: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise CoresError(f"--cores {text!r} is not auto, none or a list like 0,2-3") from None
    if not cores:
        raise CoresError(f"--cores {text!r} names no core")
    return tuple(sorted(cores))


def plan_cores(
    option: str, affinity: Cores, online: Cores, pinned_by_default: bool, num_ranks: int, owner: str
) -> CoreRequest:
    """Translate `--cores option` to cores on this machine; no cores mean: do not pin.

    An affinity smaller than the machine was set by a static CPU manager: all of its cores are ours.
    Otherwise an engine that is pinned by default gets one free core per rank. Agents in containers
    do not see each other's locks, so the name of the `owner` decides which core is tried first.
    """
    if option == "none":
        return CoreRequest(())
    if option != "auto":
        cores = parse(option)
        absent = sorted(set(cores) - affinity)
        if absent:
            raise CoresError(f"--cores {option}: this process may not use core {absent[0]}")
        return CoreRequest(cores)
    if not pinned_by_default:
        return CoreRequest(())
    if affinity < online:
        return CoreRequest(tuple(sorted(affinity)))
    cores = tuple(sorted(affinity))
    first = zlib.crc32(owner.encode()) % len(cores)
    return CoreRequest((*cores[first:], *cores[:first]), count=num_ranks)


def build_omp_binding(cores: Sequence[int], ranks: int) -> str:
    """Return VLLM_CPU_OMP_THREADS_BIND: equal parts of `cores`, one per rank, joined by `|`. Raises
    CoresError when there are fewer cores than ranks."""
    per_rank = len(cores) // ranks
    if not per_rank:
        raise CoresError(f"{ranks} ranks need {ranks} cores; --cores gives {len(cores)}")
    groups = (cores[rank * per_rank : (rank + 1) * per_rank] for rank in range(ranks))
    return "|".join(",".join(map(str, group)) for group in groups)


def list_online_cores() -> Cores:
    """Return the cores of this machine, including those that this process may not use."""
    try:
        return frozenset(parse(Path("/sys/devices/system/cpu/online").read_text().strip()))
    except OSError:
        return frozenset(range(os.cpu_count() or 1))


class CoreLocks:
    """Locks on cores, until they are released or the process ends."""

    def __init__(self, folder: Path, owner: str) -> None:
        self._folder = folder
        self._owner = owner
        self._descriptors: dict[int, int] = {}

    def acquire(self, request: CoreRequest, allow_shared: bool) -> tuple[int, ...]:
        """Lock the cores of a request in order. Raises CoresError when one is taken."""
        if request.count is None:
            return self._acquire_all(request.cores, allow_shared)
        free = self._acquire_some(request.cores, request.count)
        if len(free) == request.count:
            return free
        if allow_shared:
            occupied = (core for core in request.cores if core not in free)
            return tuple(sorted((*free, *occupied)))[: request.count]
        self.release()
        raise CoresError(
            f"{request.count} free core(s) needed, {len(free)} available: "
            f"{self._describe_holders(request.cores)}; stop one or pass --allow-shared-cores"
        )

    def release(self) -> None:
        """Unlock all cores."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _acquire_all(self, cores: tuple[int, ...], allow_shared: bool) -> tuple[int, ...]:
        for core in cores:
            if not self._lock(core) and not allow_shared:
                self.release()
                raise CoresError(
                    f"{self._describe_holders((core,))}; choose others with --cores X"
                    " or pass --allow-shared-cores"
                )
        return cores

    def _acquire_some(self, cores: Iterable[int], count: int) -> tuple[int, ...]:
        locked: list[int] = []
        for core in cores:
            if len(locked) == count:
                break
            if self._lock(core):
                locked.append(core)
        return tuple(locked)

    def _lock(self, core: int) -> bool:
        descriptor = self._open(core)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno == errno.EWOULDBLOCK:
                return False
            raise
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {self._owner}\n".encode(), 0)
        self._descriptors[core] = descriptor
        return True

    def _open(self, core: int) -> int:
        path = get_lock_file(self._folder, core)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._folder.stat().st_uid == os.getuid():
                # Agents of other users lock here, too, and must not remove our files.
                self._folder.chmod(0o777 | stat.S_ISVTX)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except PermissionError:
            # protected_regular forbids O_CREAT on another user's file in a sticky folder.
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(descriptor).st_uid == os.getuid():
            os.fchmod(descriptor, 0o666)
        return descriptor

    def _describe_holders(self, cores: Iterable[int]) -> str:
        return ", ".join(
            f"core {core} is held by {describe_holder(self._folder, core)}" for core in cores
        )
