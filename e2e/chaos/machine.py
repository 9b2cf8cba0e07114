"""A disk and a clock of a run's own, so that one can be full and the other wrong.

The disk is a small file system in memory, in a mount namespace of the run (see `network.isolate`).
The clock is libfaketime's, where Debian's package `libfaketime` is installed: the wall clock of
every process of the fleet follows a file, while clocks that count from the start go on.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.chaos.network import MARK

DISK_MIB = 96
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1")
JUMP_S = 3_600
FILLER = "filler"
_PIECE = bytes(1 << 20)


@dataclass(frozen=True)
class Machine:
    """What the fleet's processes take for their machine."""

    folder: Path
    """For everything that they write."""
    clock: Path | None
    """Offset of their wall clock; None: it is the real one."""
    kinds: frozenset[str]
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
    if FAKETIME.exists():
        clock = folder / "clock"
        set_clock(clock, 0)
        os.environ |= {
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(clock),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",
        }
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
    """At once for processes that look again."""
    part = clock.with_suffix(".part")
    part.write_text(f"{offset_s:+d}\n")
    part.replace(clock)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=30)
