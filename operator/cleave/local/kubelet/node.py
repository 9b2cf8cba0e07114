"""The capacity of this machine for pods: cores, memory, GPUs.

Read once by `up` before planning. GPUs are listed with nvidia-smi, which needs no library. Agents
lock one file per core. Trying such a lock, even briefly, could fail an agent that locks the core at
the same moment; reading the kernel's list of locks has no side effect.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cleave.shm.core_locks import get_lock_folder, parse_core

_NVIDIA_SMI_TIMEOUT_S = 20


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """One GPU as nvidia-smi names it."""

    index: int
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class LocalNode:
    """Capacity of one machine."""

    name: str
    cores: frozenset[int]
    """Cores that this process may run on."""
    memory_bytes: int
    """Available now: free, or used by reclaimable caches."""
    gpus: tuple[GpuDevice, ...] = ()
    held_cores: frozenset[int] = frozenset()
    """Those of `cores` that engines of other deployments use exclusively."""

    @property
    def free_cores(self) -> frozenset[int]:
        """Cores that can be assigned exclusively."""
        return self.cores - self.held_cores


def inspect_node() -> LocalNode:
    """The current capacity of this machine."""
    cores = frozenset(os.sched_getaffinity(0))
    return LocalNode(
        name=os.uname().nodename,
        cores=cores,
        held_cores=cores & find_locked_cores(get_lock_folder()),
        memory_bytes=_read_available_bytes(),
        gpus=_list_gpus(),
    )


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


def _read_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return min(int(rest.split()[0]) * 1024, read_cgroup_available_bytes())
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def read_cgroup_available_bytes(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes available within the memory limit of a container; without a limit, 2**63."""
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        lines = (group / "memory.stat").read_text().splitlines()
    except OSError:
        return 2**63
    if limit == "max":
        return 2**63
    # Inactive file caches are reclaimable.
    cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    return max(0, int(limit) - max(0, used - cached))


def _list_gpus() -> tuple[GpuDevice, ...]:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return ()
    query = [smi, "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    # With a broken driver, the machine counts as one without GPUs.
    return parse_gpus(done.stdout) if done.returncode == 0 else ()


def parse_gpus(csv: str) -> tuple[GpuDevice, ...]:
    """GPUs from nvidia-smi's lines `index, name, memory in MiB`."""
    rows = [[field.strip() for field in line.split(",")] for line in csv.splitlines() if line]
    return tuple(
        GpuDevice(int(index), name, int(memory) * 2**20 if memory.isdigit() else 0)
        for index, name, memory in rows
    )
