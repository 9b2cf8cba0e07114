"""Which cores engines of this machine hold already, whoever started them.

Read when the machine is inspected, so that a second deployment is planned around the first.
Agents lock one file per core. What is hard: trying the lock, even for an instant, could make an
agent that wants it in the same instant give up; the kernel's list of locks disturbs nobody.
"""

import os
from pathlib import Path

from cleave.metrics.core_locks import core_of


def held(locks: Path, kernel_list: Path = Path("/proc/locks")) -> frozenset[int]:
    """Cores whose file in `locks` some process holds; none when that cannot be known."""
    try:
        locked = set(parse(kernel_list.read_text()))
        files = list(locks.iterdir())
    except OSError:
        return frozenset()
    return frozenset(
        core for file in files if (core := core_of(file)) is not None and _identity(file) in locked
    )


def parse(kernel_list: str) -> list[tuple[int, int, int]]:
    """Major and minor device and inode of every file that /proc/locks names as locked."""
    found = []
    for line in kernel_list.splitlines():
        fields = line.split()
        if "FLOCK" in fields and "->" not in fields:
            major, minor, inode = fields[-3].split(":")
            found.append((int(major, 16), int(minor, 16), int(inode)))
    return found


def _identity(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return os.major(status.st_dev), os.minor(status.st_dev), status.st_ino
