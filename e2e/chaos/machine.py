"""A disk and a clock of a run's own, so that one can be full and the other wrong.

The disk is a small file system in memory, in a mount namespace of the run (see `network.isolate`).
The clock is a library that is compiled here and preloaded into every process of the fleet: the wall
clock follows a file, while clocks that count from the start go on. No C compiler: no wrong clock.
"""

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.chaos.network import MARK

DISK_MIB = 96
CLOCK_SOURCE = Path(__file__).with_name("clock.c")
JUMP_S = 3_600
FILLER = "filler"
_PIECE = bytes(1 << 20)


@dataclass(frozen=True)
class Machine:
    """What the fleet's processes take for their machine."""

    folder: Path
    """For everything that they write."""
    clock: Path | None = None
    """Offset of their wall clock; None: it is the real one."""
    kinds: frozenset[str] = frozenset()
    """Faults that may happen to it."""

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Not a byte is left while this is open."""
        filler = self.folder / FILLER
        try:
            with filler.open("wb", buffering=0) as file:
                try:
                    while True:
                        file.write(_PIECE)
                except OSError:
                    pass
            yield
        finally:
            filler.unlink(missing_ok=True)

    @contextmanager
    def wrong_clock(self, hours: int) -> Iterator[None]:
        """It jumps, and jumps back when this is closed."""
        assert self.clock is not None
        try:
            set_clock(self.clock, hours * JUMP_S)
            yield
        finally:
            set_clock(self.clock, 0)


@contextmanager
def own_machine(folder: Path) -> Iterator[Machine]:
    """As much of one as is possible here; changes the environment of processes to come."""
    kinds, clock = set(), None
    if compiler := shutil.which("cc"):
        clock, library = folder / "clock", folder / "clock.so"
        set_clock(clock, 0)
        _run(compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(CLOCK_SOURCE))
        os.environ |= {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(clock)}
        kinds.add("jump clock")
    if MARK not in os.environ:
        yield Machine(folder, clock, frozenset(kinds))
        return
    disk = folder / "disk"
    disk.mkdir()
    _run("mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "chaos", str(disk))
    try:
        temporary = disk / "tmp"
        temporary.mkdir()
        os.environ["TMPDIR"] = str(temporary)
        yield Machine(disk, clock, frozenset((*kinds, "fill disk")))
    finally:
        _run("umount", "--lazy", str(disk))


def set_clock(clock: Path, offset_s: int) -> None:
    """For all processes at once: they have mapped the file."""
    with clock.open("r+b" if clock.exists() else "wb") as file:
        file.write(struct.pack("=d", offset_s))


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)
