"""One core for the whole benchmark, so that figures of two programs mean the same.

Called by run.py before anything is measured; programs started afterwards inherit the core.
"""

import os
import time
from pathlib import Path

LOOK_S = 0.5


def pin() -> tuple[int, float]:
    """Keeps this process on the least busy core; its number, and how busy it was (0..1)."""
    before = _ticks()
    time.sleep(LOOK_S)
    after = _ticks()
    busy = {core: _share(before[core], after[core]) for core in os.sched_getaffinity(0)}
    core = min(busy, key=lambda number: busy[number])
    os.sched_setaffinity(0, {core})
    return core, busy[core]


def describe() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown processor"


def _ticks() -> dict[int, tuple[int, int]]:
    """Core -> (busy, all) ticks since boot."""
    found = {}
    for line in Path("/proc/stat").read_text().splitlines():
        name, *values = line.split()
        if name.startswith("cpu") and name != "cpu":
            ticks = [int(value) for value in values]
            found[int(name[3:])] = (sum(ticks) - ticks[3] - ticks[4], sum(ticks))
    return found


def _share(before: tuple[int, int], after: tuple[int, int]) -> float:
    return (after[0] - before[0]) / max(1, after[1] - before[1])
