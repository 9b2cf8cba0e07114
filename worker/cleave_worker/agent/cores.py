"""Which CPU cores the engine gets, and that no two engines get the same one.

Called by main before anything else starts. Two vLLM CPU servers bound to one core hang, so a core
is taken by a lock file that the kernel releases with the process, however it ends.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cleave.metrics.core_locks import lock_file

Cores = frozenset[int]


class CoresError(RuntimeError):
    """The engine cannot have the cores; the message names core, holder and remedy."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What to take: all of `cores`, or any `count` free ones of them."""

    cores: tuple[int, ...]
    count: int | None = None
    """None: every one of `cores`."""


def parse(text: str) -> tuple[int, ...]:
    """`0,2-3` to (0, 2, 3). Raises CoresError."""
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


def wish(option: str, affinity: Cores, online: Cores, pinned_by_default: bool, ranks: int) -> Wish:
    """What `--cores option` means on this machine; a wish for no core means: do not pin.

    An affinity smaller than the machine was set by a static CPU manager: those cores are ours.
    Otherwise an engine that wants pinning gets one free core for each of its ranks.
    """
    if option == "none":
        return Wish(())
    if option != "auto":
        wanted = parse(option)
        absent = sorted(set(wanted) - affinity)
        if absent:
            raise CoresError(f"--cores {option}: this process may not use core {absent[0]}")
        return Wish(wanted)
    if not pinned_by_default:
        return Wish(())
    if affinity < online:
        return Wish(tuple(sorted(affinity)))
    return Wish(tuple(sorted(affinity)), count=ranks)


def omp_binding(cores: Sequence[int], ranks: int) -> str:
    """VLLM_CPU_OMP_THREADS_BIND: equal shares of `cores`, one for each rank, joined by `|`.

    Raises CoresError when there are fewer cores than ranks.
    """
    share = len(cores) // ranks
    if not share:
        raise CoresError(f"{ranks} ranks need as many cores; --cores gives {len(cores)}")
    shares = (cores[rank * share : (rank + 1) * share] for rank in range(ranks))
    return "|".join(",".join(map(str, part)) for part in shares)


def online() -> Cores:
    """Cores of this machine, whether or not this process may use them."""
    try:
        return frozenset(parse(Path("/sys/devices/system/cpu/online").read_text().strip()))
    except OSError:
        return frozenset(range(os.cpu_count() or 1))


class CoreLocks:
    """Cores that this process holds until it ends."""

    def __init__(self, where: Path, owner: str) -> None:
        self._where = where
        self._owner = owner
        self._held: dict[int, int] = {}

    def take(self, wish: Wish, allow_shared: bool) -> tuple[int, ...]:
        """Lock what is wished for, in order. Raises CoresError when a core is taken."""
        if wish.count is None:
            return self._take_all(wish.cores, allow_shared)
        free = self._take_some(wish.cores, wish.count)
        if len(free) == wish.count:
            return free
        if allow_shared:
            others = (core for core in wish.cores if core not in free)
            return tuple(sorted((*free, *others)))[: wish.count]
        self.release()
        raise CoresError(
            f"{wish.count} free core(s) wanted, {len(free)} left: {self._holders(wish.cores)}"
            "; stop one or pass --allow-shared-cores"
        )

    def release(self) -> None:
        """Give all cores back."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def _take_all(self, cores: tuple[int, ...], allow_shared: bool) -> tuple[int, ...]:
        for core in cores:
            if not self._lock(core) and not allow_shared:
                self.release()
                raise CoresError(
                    f"{self._holders((core,))}; choose others with --cores X"
                    " or pass --allow-shared-cores"
                )
        return cores

    def _take_some(self, cores: Iterable[int], count: int) -> tuple[int, ...]:
        taken: list[int] = []
        for core in cores:
            if len(taken) == count:
                break
            if self._lock(core):
                taken.append(core)
        return tuple(taken)

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
        self._held[core] = descriptor
        return True

    def _open(self, core: int) -> int:
        path = lock_file(self._where, core)
        try:
            self._where.mkdir(parents=True, exist_ok=True)
            if self._where.stat().st_uid == os.getuid():
                # Agents of other users lock here too, and must not remove our files.
                self._where.chmod(0o777 | stat.S_ISVTX)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except PermissionError:
            # protected_regular forbids O_CREAT on another user's file in a sticky folder.
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(descriptor).st_uid == os.getuid():
            os.fchmod(descriptor, 0o666)
        return descriptor

    def _holders(self, cores: Iterable[int]) -> str:
        return ", ".join(f"core {core} is held by {self._holder(core)}" for core in cores)

    def _holder(self, core: int) -> str:
        try:
            pid, _, name = lock_file(self._where, core).read_text().strip().partition(" ")
        except OSError:
            pid, name = "", ""
        return f"process {pid} ({name})" if pid else "a process of another user"
