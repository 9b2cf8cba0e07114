"""The cores that engines on this machine have locked, of any deployment.

Read when the machine is inspected, so that a second deployment avoids the cores of the first.
Agents lock one file per core. Trying a lock, even briefly, could fail an agent that locks the core
at the same moment; reading the kernel's list of locks has no side effect.
"""

import os
from pathlib import Path

from cleave.shm.core_locks import parse_core


def find_locked_cores(locks: Path, kernel_list: Path = Path("/proc/locks")) -> frozenset[int]:
    """Cores whose file in folder `locks` is locked by a process; empty if that cannot be read."""
    try:
        locked = set(parse_locks(kernel_list.read_text()))
        files = list(locks.iterdir())
    except OSError:
        return frozenset()
    return frozenset(
        core
        for file in files
        if (core := parse_core(file)) is not None and _get_file_id(file) in locked
    )


def parse_locks(kernel_list: str) -> list[tuple[int, int, int]]:
    """Major and minor device and inode of every file that /proc/locks names as locked."""
    locks = []
    for line in kernel_list.splitlines():
        fields = line.split()
        if "FLOCK" in fields and "->" not in fields:
            major, minor, inode = fields[-3].split(":")
            locks.append((int(major, 16), int(minor, 16), int(inode)))
    return locks


def _get_file_id(file: Path) -> tuple[int, int, int]:
    status = file.stat()
    return os.major(status.st_dev), os.minor(status.st_dev), status.st_ino
