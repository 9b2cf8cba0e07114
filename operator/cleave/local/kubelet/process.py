"""One container process: start, wait, signal. The kubelet's edge to the operating system.

A process group may be signalled only until its leader is reaped, else the signal may hit an
unrelated process with the same id. So exits are observed through a pidfd, the rest of the group is
killed while the leader is a zombie, and only then is the leader reaped.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cleave.local.files import create_private_folder
from cleave.local.kubelet import exec_wrapper


class Process:
    """A running container process, leader of its own session and group."""

    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        self._child = child
        self._exit_code = asyncio.get_running_loop().create_future()
        self._pidfd = os.pidfd_open(child.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._reap)

    @property
    def pid(self) -> int:
        """Process id, which is its group's id too."""
        return self._child.pid

    async def wait(self) -> int:
        """The exit code; minus the signal's number when one ended it."""
        return int(await asyncio.shield(self._exit_code))

    async def stop(self, grace_s: float) -> int:
        """Stop it if it still runs; returns the exit code. SIGTERM first, SIGKILL to the whole
        group after `grace_s` seconds."""
        if self._exit_code.done():
            return await self.wait()
        self.terminate()
        try:
            async with asyncio.timeout(grace_s):
                return await self.wait()
        except TimeoutError:
            self.kill()
            return await self.wait()

    def terminate(self) -> None:
        """SIGTERM to the process, as Kubernetes signals a container's first process."""
        self._child.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        if not self._exit_code.done():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def set_cores(self, cores: frozenset[int]) -> None:
        """Move every thread of the group to `cores`."""
        for thread in _list_threads(self.pid):
            with contextlib.suppress(OSError):  # It may have ended since.
                os.sched_setaffinity(thread, cores)

    def _reap(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.kill()
        self._exit_code.set_result(self._child.wait())


def start_process(
    argv: Sequence[str], env: Mapping[str, str], cores: frozenset[int], log: Path
) -> Process:
    """Start `argv` on `cores`, output appended to `log`. It gets SIGTERM when this process dies."""
    launcher = [sys.executable, "-I", "-S", exec_wrapper.__file__, str(os.getpid())]
    create_private_folder(log.parent)
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        child = subprocess.Popen(
            [*launcher, *argv],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
            start_new_session=True,
        )
    finally:
        os.close(log_fd)
    process = Process(child)
    # Set here and not in the launcher, which might overwrite a later change.
    process.set_cores(cores)
    return process


def _list_threads(group: int) -> list[int]:
    """Ids of all threads of the processes in `group`."""
    threads: list[int] = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            # After the parenthesised name: state, parent, group.
            if int((entry / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                threads += [int(task.name) for task in (entry / "task").iterdir()]
    return threads
