"""`python -m e2e.real_nodes.sandbox COMMAND...`: runs it where a cluster of real nodes may start.

Makes namespaces for processes, mounts and the network, sets FOLDER_VARIABLE and runs the command.
When it ends, the kernel ends every process in them, containers and kubelets too, and mounts and
interfaces go with the last one; control groups and the folder are removed from outside.

Needs root and PROGRAMS. Exit code: the command's, or 2 when something is missing or a sandbox runs
already.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER_VARIABLE = "CLEAVE_REAL_NODES"
"""Environment variable with the folder in which nodes keep their state; set inside only."""
CGROUP = "cleave-e2e"
"""Parent of the nodes' control groups, in each hierarchy."""
PROGRAMS = ("ip", "ipset", "iptables", "nft", "nsenter", "runc", "unshare")
"""What sandbox and nodes run of the machine's; `scripts/bootstrap --nodes` installs them."""

MOUNT_POINTS = (
    "etc/cni/net.d", "etc/containerd", "run/containerd", "run/kubelet", "run/netns", "var/lib/cni",
    "var/lib/containerd", "var/lib/kubelet", "var/log/containers", "var/log/pods",
)  # fmt: skip
"""Folders of the machine, below /, over which sandbox or nodes mount their own."""

_FOLDERS = "/var/tmp"
_INSIDE = "--inside"
_CGROUPS = Path("/sys/fs/cgroup")
_REMOVAL_TIMEOUT_S = 20
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """Run the command in the sandbox; returns its exit code."""
    if arguments[:1] == [_INSIDE]:
        return _run_as_init(arguments[1:])
    if os.geteuid() != 0:
        return _refuse("real nodes need root")
    found = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    if missing := [name for name in PROGRAMS if not shutil.which(name, path=found)]:
        return _refuse(f"{', '.join(missing)}: not found; run scripts/bootstrap --nodes")
    lock = os.open(_FOLDERS, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # The end of one removes control groups and mount points that another one uses.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _refuse("real nodes run on this machine already; wait for their end")
    folder = Path(tempfile.mkdtemp(prefix="cleave-nodes-", dir=_FOLDERS))
    unshare = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    command = [*unshare, sys.executable, "-m", __spec__.name, _INSIDE, *arguments]
    with _mount_points():
        try:
            return _run_to_end(command, os.environ | {FOLDER_VARIABLE: str(folder)})
        finally:
            _remove_cgroups()
            shutil.rmtree(folder)


@contextlib.contextmanager
def _mount_points() -> Iterator[None]:
    """MOUNT_POINTS exist; those that were not there before are removed afterwards."""
    paths = [Path("/", name) for name in MOUNT_POINTS]
    made = [each for path in paths for each in (path, *path.parents) if not each.exists()]
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for path in sorted({*made}, reverse=True):
            path.rmdir()


def _refuse(reason: str) -> int:
    print(f"cleave: {reason}", file=sys.stderr)
    return 2


def _run_to_end(command: list[str], env: dict[str, str]) -> int:
    """Run a command and wait for its end; SIGTERM ends it and all that it started.

    `unshare` ignores both signals. A terminal's SIGINT reaches the command itself.
    """
    process = subprocess.Popen(command, env=env)
    signal.signal(signal.SIGTERM, lambda *_: process.kill())
    signal.signal(signal.SIGINT, lambda *_: None)
    return process.wait()


def _run_as_init(command: list[str]) -> int:
    """As process 1: run the command, and reap what containerd's shims leave."""
    # Named network namespaces are mounts here, not files of the machine.
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run/netns"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    process = subprocess.Popen(command)
    for number in _SIGNALS:
        signal.signal(number, lambda received, _: process.send_signal(received))
    while True:
        ended, status = os.wait()
        if ended == process.pid:
            return os.waitstatus_to_exitcode(status)


def _remove_cgroups() -> None:
    """Remove the nodes' control groups, which are free once the kernel has ended the processes."""
    deadline = time.monotonic() + _REMOVAL_TIMEOUT_S
    # Where version 1 is in use, runc makes groups in version 2 beside it, too.
    while groups := [*_CGROUPS.glob(CGROUP), *_CGROUPS.glob(f"*/{CGROUP}")]:
        for group in groups:
            for path, _, _ in os.walk(group, topdown=False):
                with contextlib.suppress(OSError):
                    os.rmdir(path)
        if time.monotonic() > deadline:
            print(f"cleave: control groups {CGROUP} are in use and stay", file=sys.stderr)
            return
        time.sleep(0.1)


def find_hierarchies() -> list[Path]:
    """The machine's hierarchies of control groups: one of version 2, or those of version 1."""
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS]
    return [
        each
        for each in sorted(_CGROUPS.iterdir())
        if (each / "cgroup.procs").exists() and not (each / "cgroup.controllers").exists()
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
