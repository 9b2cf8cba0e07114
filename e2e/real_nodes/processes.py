"""Processes of pods and nodes, as the kernel shows them to tests inside the sandbox.

A pod's processes are those of its control group, a node's those of its mount namespace. Tests
signal them, take their memory or their CPU, and start a node again.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from e2e.real_nodes.sandbox import CGROUP, find_hierarchies

_BALLOON = """
import pathlib, sys, time
group, step = pathlib.Path(sys.argv[1]), 4 << 20
files = [group / "memory.oom_control", group / "memory.events"]
events = next(file for file in files if file.exists())
def count_kills():
    lines = (line.split() for line in events.read_text().splitlines())
    return next(int(number) for name, number in lines if name == "oom_kill")
before = count_kills()
(group / "cgroup.procs").write_text("0")
held = []
while count_kills() == before:
    held.append(b"1" * step)
    time.sleep(0.002)
"""
"""For `python -c`: joins a control group and takes memory in it until the kernel kills for it."""
_BALLOON_TIMEOUT_S = 60
_THROTTLE_PERIOD_S = 0.1
"""As of the kernel's quotas."""
_NEW_GROUPS_S = 0.05
"""How often control groups of new containers are looked for."""


@dataclass(frozen=True)
class PodProcess:
    """A process of a pod."""

    pid: int
    command: str

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing when it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return Path(f"/proc/{self.pid}").exists()


def list_processes(pod_uid: str) -> list[PodProcess]:
    """Processes of a pod, its pause included, oldest first."""
    return sorted(
        (
            PodProcess(pid, _read(pid, "cmdline").replace("\0", " ").strip())
            for pid in _list_pids()
            if f"pod{pod_uid}" in _read(pid, "cgroup")
        ),
        key=lambda process: process.pid,
    )


def find_process(pod_uid: str, command: str) -> PodProcess | None:
    """The process of a pod whose command line contains `command`, and not one that started it."""
    return next((each for each in list_processes(pod_uid)[::-1] if command in each.command), None)


def exhaust_memory(process: PodProcess) -> None:
    """Take all memory of a process's container, until the kernel has killed once for it.

    It kills the container's largest process: the kubelet gives all of them nearly the highest
    score, and what takes the memory here has none.
    """
    group = _find_group(process.pid, "memory")
    command = [sys.executable, "-I", "-S", "-c", _BALLOON, str(group)]
    # In version 2 the kernel kills the group as a whole, and what takes the memory with it.
    subprocess.run(command, capture_output=True, timeout=_BALLOON_TIMEOUT_S, check=False)


@contextlib.contextmanager
def limited_cpu(node: str, share: float) -> Iterator[None]:
    """Pods of a node run this share of the time only, while the block lasts.

    They are frozen for the rest of each period, as a quota would throttle them; version 1 of
    control groups accepts no quota below those of single containers.
    """
    over = threading.Event()
    freezer = threading.Thread(target=_freeze_and_thaw, args=(node, share, over))
    freezer.start()
    try:
        yield
    finally:
        over.set()
        freezer.join()


def _freeze_and_thaw(node: str, share: float, over: threading.Event) -> None:
    (hierarchy,) = (each for each in find_hierarchies() if each.name in ("freezer", "cgroup"))
    group = hierarchy / CGROUP / node
    file, frozen, thawed = group / "freezer.state", "FROZEN", "THAWED"
    if not file.exists():
        file, frozen, thawed = group / "cgroup.freeze", "1", "0"
    try:
        while not over.wait(share * _THROTTLE_PERIOD_S):
            file.write_text(frozen)
            time.sleep((1 - share) * _THROTTLE_PERIOD_S)
            file.write_text(thawed)
    finally:
        file.write_text(thawed)


@contextlib.contextmanager
def slow_disk(node: str, folder: Path, bytes_per_s: int) -> Iterator[None]:
    """Each container of a node reads at most that fast from the disk of `folder`, of which nothing
    is in memory, while the block lasts."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
    over = threading.Event()
    throttle = threading.Thread(target=_throttle_reads, args=(node, folder, bytes_per_s, over))
    throttle.start()
    try:
        yield
    finally:
        over.set()
        throttle.join()


def _throttle_reads(node: str, folder: Path, bytes_per_s: int, over: threading.Event) -> None:
    """Version 1 of control groups throttles the processes of a group, not those below it."""
    (hierarchy,) = (each for each in find_hierarchies() if each.name in ("blkio", "cgroup"))
    name, line, unlimited = "blkio.throttle.read_bps_device", "{} {}", "{} 0"
    if not (hierarchy / name).exists():
        name, line, unlimited = "io.max", "{} rbps={}", "{} rbps=max"
    device = folder.stat().st_dev
    disk = f"{os.major(device)}:{os.minor(device)}"
    limited: set[Path] = set()
    while not over.wait(_NEW_GROUPS_S):
        for file in {*(hierarchy / CGROUP / node).rglob(name)} - limited:
            with contextlib.suppress(FileNotFoundError):
                file.write_text(line.format(disk, bytes_per_s))
                limited.add(file)
    for file in limited:
        with contextlib.suppress(OSError):
            file.write_text(unlimited.format(disk))


def kill_node(node: str) -> None:
    """SIGKILL all that runs on a node, at once: its pods, containerd, kubelet and kube-proxy."""
    host = next(pid for pid in _list_pids() if _is_host(pid, node))
    namespace = _read_link(host, "ns/mnt")
    while found := [
        pid
        for pid in _list_pids()
        if (f"/{CGROUP}/{node}/" in _read(pid, "cgroup") or _read_link(pid, "ns/mnt") == namespace)
        and _read(pid, "cmdline")
    ]:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _is_host(pid: int, node: str) -> bool:
    """Whether it runs `node_host` for this node, and is not the program that enters namespaces."""
    arguments = _read(pid, "cmdline").split("\0")
    return "e2e.real_nodes.node_host" in arguments and f"/{node}/plan.json" in "".join(arguments)


def _find_group(pid: int, controller: str) -> Path:
    """The control group of a process that limits `controller`."""
    for line in _read(pid, "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return Path("/sys/fs/cgroup", controller, path.lstrip("/"))
    path = _read(pid, "cgroup").rpartition("0::")[2].strip()
    return Path("/sys/fs/cgroup", path.lstrip("/"))


def _list_pids() -> list[int]:
    return [int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()]


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""


def _read_link(pid: int, name: str) -> str:
    try:
        return str(Path(f"/proc/{pid}/{name}").readlink())
    except OSError:
        return ""
