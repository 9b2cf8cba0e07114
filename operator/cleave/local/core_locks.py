"""Which cores engines of this machine hold already, whoever started them.

Read when the machine is inspected, so that a second deployment is planned around the first.
Agents lock one file per core. What is hard: trying the lock, even for an instant, could make an
agent that wants it in the same instant give up; the kernel's list of locks disturbs nobody.
"""

import os
import re
import tempfile
from pathlib import Path

_LOCK_FILE = re.compile(r"core-(\d+)\.lock")


def folder() -> Path:
    """Where agents keep their lock files, one per core."""
    return Path(tempfile.gettempdir()) / "cleave-cores"


def held(locks: Path, kernel_list: Path = Path("/proc/locks")) -> frozenset[int]:
    """Cores whose file in `locks` some process holds; none when that cannot be known."""
    try:
        locked = set(parse(kernel_list.read_text()))
        files = list(locks.iterdir())
    except OSError:
        return frozenset()
    return frozenset(
        int(name[1])
        for file in files
        if (name := _LOCK_FILE.fullmatch(file.name)) and _identity(file) in locked
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
