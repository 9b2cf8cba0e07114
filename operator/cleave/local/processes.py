"""Finds the processes of a deployment by what the kernel knows of them.

Used where a deployment is stopped: its files may be gone or damaged, and a process id in a file may
be that of another program by now. The supervisor holds the lock of the state folder, and every
process of a pod has the folder's list of agents in its environment.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from cleave.rpc.agent_discovery import ENV as AGENTS_ENV

_PROC = Path("/proc")
_DELETED = " (deleted)"


def find_lock_holders(lock: Path) -> list[int]:
    """Other processes that hold an exclusive flock on `lock`, also if it was removed since."""
    path = str(lock.parent.resolve() / lock.name)
    names = {path, path + _DELETED}
    return [pid for pid in _list_others() if any(_holds_lock(fd) for fd in _list_fds(pid, names))]


def find_pod_processes(agents_file: Path) -> list[int]:
    """Processes of the pods whose list of agents is this file."""
    mark = f"{AGENTS_ENV}=file:{agents_file}".encode()
    return [
        pid for pid in _list_others() if mark in _read(_PROC / str(pid) / "environ").split(b"\0")
    ]


def _list_others() -> Iterator[int]:
    own = os.getpid()
    yield from (
        int(each.name) for each in _PROC.iterdir() if each.name.isdigit() and int(each.name) != own
    )


def _list_fds(pid: int, names: set[str]) -> Iterator[Path]:
    """Yield what the kernel says of each descriptor of a process that is open on one of `names`."""
    try:
        descriptors = list((_PROC / str(pid) / "fd").iterdir())
    except OSError:
        # Ended since, or of another user.
        return
    for each in descriptors:
        try:
            target = os.readlink(each)
        except OSError:
            continue
        if target in names:
            yield _PROC / str(pid) / "fdinfo" / each.name


def _holds_lock(descriptor: Path) -> bool:
    lines = _read(descriptor).splitlines()
    return any(
        line.startswith(b"lock:") and b"FLOCK" in line and b"WRITE" in line for line in lines
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
