"""Starts and stops an LLMDeployment on this machine.

Called by the command line. The same planner and pod builders serve a cluster; only the executor
differs. No process may be left running after any interruption of the start (a failure, a timeout,
Ctrl-C).
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from typing import NamedTuple

from cleave.local import state
from cleave.local.errors import DeploymentStartError, StateError
from cleave.local.kubelet import logs
from cleave.local.kubelet.network import HOST_IP, find_busy_ports
from cleave.local.kubelet.node import LocalNode
from cleave.local.kubelet.pod_spec import PodError, format_gib, parse_pod
from cleave.local.launch_plan import LaunchPlan
from cleave.local.progress import (
    ShowProgress,
    StartupOutcome,
    StartupResult,
    StartupView,
    wait_until_ready,
)
from cleave.local.state import DeploymentSnapshot, StateFolder
from cleave.local.supervisor import DeploymentSupervisor
from cleave.manifests.labels import Manifest
from cleave.shm.core_locks import describe_holder, get_lock_folder

ProgressDisplay = AbstractContextManager[ShowProgress]
"""A context manager that yields the function that shows steps."""

_END_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_POLL_INTERVAL_S = 0.1
_FORCED_STOP_TIMEOUT_S = 15.0
_LOG_LINES = 12


def check_can_start(job: LaunchPlan) -> None:
    """Raise DeploymentStartError with the missing resources, StateError when it already runs."""
    state.get_folder(job.deployment).require_stopped()
    try:
        faults = _find_shortages(job.pods, job.node, job.allow_shared_cores)
    except PodError as error:
        raise DeploymentStartError([str(error)]) from error
    if find_busy_ports(HOST_IP, [job.port]):
        faults.append(f"port {job.port} of {HOST_IP} is in use; choose another with --port")
    if faults:
        raise DeploymentStartError(faults)


def _find_shortages(pods: Sequence[Manifest], node: LocalNode, allow_shared: bool) -> list[str]:
    """One line per resource of which the pods request more than there is, with the remedy."""
    specs = [parse_pod(pod) for pod in pods]
    shortages = []
    memory = sum(spec.memory_bytes for spec in specs)
    if memory > node.memory_bytes:
        shortages.append(
            f"{format_gib(memory)} of memory needed for {len(specs)} pods, "
            f"{format_gib(node.memory_bytes)} available; "
            "use fewer replicas or lower spec.template.resources"
        )
    cores = sum(spec.exclusive_cores for spec in specs)
    if cores > len(node.free_cores) and not allow_shared:
        holders = {describe_holder(get_lock_folder(), core) for core in node.held_cores}
        used = f"{len(node.held_cores)} used by other engines: {', '.join(sorted(holders))}"
        reserved = f", {used}" if holders else ""
        shortages.append(
            f"{cores} exclusive cores needed, {len(node.cores)} available{reserved}; "
            "use fewer replicas, or --allow-shared-cores to share them (slower, unreliable timings)"
        )
    gpus = sum(spec.gpus for spec in specs)
    if gpus > len(node.gpus):
        shortages.append(f"{gpus} GPUs needed, {len(node.gpus)} available; use fewer replicas")
    return shortages


class ForegroundRun(NamedTuple):
    """A deployment that runs in this process."""

    supervisor: DeploymentSupervisor
    shown: StartupView
    """What its display has shown last."""


@asynccontextmanager
async def run_in_foreground(
    job: LaunchPlan, screen: ProgressDisplay, timeout_s: float
) -> AsyncIterator[ForegroundRun]:
    """Run `job` in this process: yields when it is ready or stopping, and ends all pods at exit.
    Raises DeploymentStartError when it fails to start, StateError when it already runs."""
    folder = state.get_folder(job.deployment)
    with folder.lock():
        folder.remove_logs()
        initial = DeploymentSnapshot(job.deployment, os.getpid(), job.url)
        folder.write(initial)
        supervisor = DeploymentSupervisor(folder, job)
        with _handle_signals((signal.SIGINT, *_END_SIGNALS), supervisor.stop):
            task = asyncio.create_task(supervisor.run())
            try:
                with screen as show:
                    end = await wait_until_ready(folder, show, timeout_s)
                _raise_on_failure(end)
                if not supervisor.is_stopping and task.done():
                    task.result()  # Raises the error of the supervisor.
                yield ForegroundRun(supervisor, end.shown or StartupView(initial, ()))
            finally:
                if not supervisor.is_stopping:
                    supervisor.stop()
                await task


async def start_detached(job: LaunchPlan, screen: ProgressDisplay, timeout_s: float) -> None:
    """Start `job` in a separate supervisor process and return when it is ready. Raises
    DeploymentStartError when it fails to start, after stopping it."""
    folder = state.get_folder(job.deployment)
    with folder.lock() as lock_fd:
        folder.remove_logs()
        job.save(folder)
        pid = _spawn_supervisor(folder, lock_fd)
        folder.write(DeploymentSnapshot(job.deployment, pid, job.url))
    try:
        # Handled like Ctrl-C.
        with _handle_signals(_END_SIGNALS, signal.raise_signal, signal.SIGINT), screen as show:
            end = await wait_until_ready(folder, show, timeout_s)
        _raise_on_failure(end)
        if end.outcome is StartupOutcome.STOPPED:
            log = logs.tail(folder.get_log_path("supervisor"), _LOG_LINES)
            raise DeploymentStartError(["stopped before it was ready"], log)
    except BaseException:
        await stop_deployment(folder, _FORCED_STOP_TIMEOUT_S)
        raise


async def stop_deployment(folder: StateFolder, timeout_s: float) -> None:
    """Stop a deployment: drain for `timeout_s`, then kill all pods. Raises StateError."""
    for number, wait_s in (
        (signal.SIGTERM, timeout_s),
        (signal.SIGTERM, _FORCED_STOP_TIMEOUT_S),
        # One that hangs or was stopped; its pods drain.
        (signal.SIGKILL, _FORCED_STOP_TIMEOUT_S),
    ):
        if not folder.is_running():
            break
        _send_signal(folder.find_supervisors(), number)
        if await _wait_until(lambda: not folder.is_running(), wait_s):
            break
    else:
        raise StateError(
            f"{folder.name} does not stop: another user's process holds {folder.path / 'lock'}; "
            f"run `cleave down {folder.name}` as that user"
        )
    await _end_pods(folder, timeout_s)
    # A killed supervisor leaves its files; a new one that has started since must keep its own.
    with suppress(StateError), folder.lock():
        folder.clear()


def _raise_on_failure(end: StartupResult) -> None:
    if end.outcome is StartupOutcome.FAILED:
        raise DeploymentStartError([end.reason], end.log)


async def _end_pods(folder: StateFolder, timeout_s: float) -> None:
    """Wait for the pods that a killed supervisor has left, which drain; then kill them."""
    if not await _wait_until(lambda: not folder.find_pod_processes(), timeout_s):
        _send_signal(folder.find_pod_processes(), signal.SIGKILL)
        await _wait_until(lambda: not folder.find_pod_processes(), _FORCED_STOP_TIMEOUT_S)


def _send_signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


async def _wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_POLL_INTERVAL_S)
    return True


@contextmanager
def _handle_signals(
    numbers: Sequence[int], handler: Callable[..., None], *args: object
) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.add_signal_handler(number, handler, *args)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _spawn_supervisor(folder: StateFolder, lock_fd: int) -> int:
    """Start a supervisor in a new session, which inherits the folder's lock. Returns its pid. Not a
    `Popen`, which warns when this process ends first, as is intended here."""
    log = str(folder.get_log_path("supervisor"))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    os.set_inheritable(lock_fd, True)
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "cleave.local.supervisor", str(folder.path)],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, flags, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
