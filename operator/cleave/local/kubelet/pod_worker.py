"""Runs one pod on this machine: start, probe, restart, stop.

The kubelet runs one `PodWorker` per pod. A stop may arrive in any phase (starting, running, waiting
to restart), so every wait of the loop is a wait for "or stopped" too, and the process is always
gone when `stop` returns.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cleave.local.kubelet import process
from cleave.local.kubelet.pod_spec import PodSpec, Probe, RestartPolicy
from cleave.local.kubelet.pod_status import ContainerTermination, PodState
from cleave.local.kubelet.probes import ProbeState, build_prober

# Delays are shorter than those of Kubernetes (10 s to 5 min): the user works at this machine.
INITIAL_BACKOFF_S = 1.0
MAX_BACKOFF_S = 30.0
BACKOFF_RESET_S = 60.0
"""A container that ran this long resets the count of failures."""


def should_restart(policy: RestartPolicy, exit_code: int) -> bool:
    """Whether a container that ended with `exit_code` has to be restarted."""
    if policy is RestartPolicy.ON_FAILURE:
        return exit_code != 0
    return policy is RestartPolicy.ALWAYS


def count_failures(before: int, ran_s: float) -> int:
    """The number of consecutive failures including this exit, which determines the delay."""
    return 1 if ran_s >= BACKOFF_RESET_S else before + 1


def compute_backoff_s(failures: int) -> float:
    """Seconds to wait before start number `failures` + 1."""
    return float(min(INITIAL_BACKOFF_S * 2 ** min(failures - 1, 16), MAX_BACKOFF_S))


@dataclass(frozen=True, slots=True)
class ContainerCommand:
    """The resolved command, environment and log file of a pod."""

    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path


class PodWorker:
    """Runs the process of one pod as its spec requires, until stopped."""

    def __init__(
        self, spec: PodSpec, pod_state: PodState, command: ContainerCommand, cores: frozenset[int],
        on_change: Callable[[], None],
    ) -> None:  # fmt: skip
        self.spec = spec
        self.state = pod_state
        self.cores = cores
        self._command = command
        self._on_change = on_change
        self._stop_requested = asyncio.Event()
        self._grace_s = spec.grace_s
        self._process: process.Process | None = None
        self._task = asyncio.create_task(self._run_loop(), name=f"pod {spec.name}")

    @property
    def log(self) -> Path:
        """Log file of the pod."""
        return self._command.log

    async def stop(self, grace_s: float | None = None) -> None:
        """Stop the pod within `grace_s` seconds (default: its own grace period). A second call may
        shorten the grace of the first."""
        grace_s = self.spec.grace_s if grace_s is None else grace_s
        self._grace_s = min(self._grace_s, grace_s)
        if self._stop_requested.is_set() and self._process is not None and grace_s == 0:
            self._process.kill()
        self._update(deleting=True, ready=False)
        self._stop_requested.set()
        await asyncio.shield(self._task)

    def set_cores(self, cores: frozenset[int]) -> None:
        """Set the CPU affinity of the pod to `cores`."""
        self.cores = cores
        if self._process is not None:
            self._process.set_cores(cores)

    async def _run_loop(self) -> None:
        failures = 0
        while True:
            ended = await self._run_once()
            again = should_restart(self.spec.restart_policy, ended.exit_code)
            if self._stop_requested.is_set() or not again:
                self._update(last=ended, pid=None)
                return
            failures = count_failures(failures, ended.finished_at - ended.started_at)
            delay_s = compute_backoff_s(failures)
            message = f"back-off {delay_s:g} s after exit code {ended.exit_code}"
            self._update(last=ended, pid=None, waiting="CrashLoopBackOff", waiting_message=message)
            if await self._wait_for_stop(delay_s):
                self._update(waiting="", waiting_message="")
                return
            self._update(restarts=self.state.restarts + 1)

    async def _run_once(self) -> ContainerTermination:
        started_at = time.time()
        argv, env, log = self._command.argv, self._command.env, self._command.log
        try:
            self._process = process.start_process(argv, env, self.cores, log)
        except OSError as error:
            # Too many processes or files, perhaps briefly. Container runtimes report code 128.
            return ContainerTermination(128, started_at, time.time(), f"StartError: {error}")
        self._update(pid=self._process.pid, started_at=started_at, waiting="", waiting_message="")
        try:
            reason = await self._supervise(self._process)
        finally:
            code = await self._process.stop(self._grace_s)
            self._process = None
        code = 128 - code if code < 0 else code
        reason = reason or ("Completed" if code == 0 else "Error")
        return ContainerTermination(code, started_at, time.time(), reason)

    async def _supervise(self, running: process.Process) -> str:
        """Wait until the process ends or must be stopped; returns the reason in the latter case."""
        unhealthy = asyncio.create_task(self._run_probes())
        stopped = asyncio.create_task(self._stop_requested.wait())
        ends = (unhealthy, stopped, asyncio.create_task(running.wait()))
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not unhealthy.done():
                return ""
            unhealthy.result()
            return "Unhealthy"
        finally:
            await _cancel(*ends)
            self._update(ready=False, started=False)

    async def _run_probes(self) -> None:
        """Run the probes of the container; returns when it must be restarted."""
        spec = self.spec
        if spec.startup is not None and not await self._wait_for_startup(spec.startup):
            return
        self._update(started=True, ready=spec.readiness is None)
        readiness = asyncio.create_task(self._watch_readiness(spec.readiness))
        try:
            await self._wait_for_liveness_failure(spec.liveness)
        finally:
            await _cancel(readiness)

    async def _wait_for_startup(self, probe: Probe) -> bool:
        async with aclosing(self._probe(probe, ProbeState(passed=False))) as states:
            async for state in states:
                if state.passed or state.failures >= probe.failure_threshold:
                    return state.passed
        return False

    async def _watch_readiness(self, probe: Probe | None) -> None:
        if probe is None:
            return
        async with aclosing(self._probe(probe, ProbeState(passed=False))) as states:
            async for state in states:
                if state.passed != self.state.ready:
                    self._update(ready=state.passed)

    async def _wait_for_liveness_failure(self, probe: Probe | None) -> None:
        if probe is None:
            await asyncio.Event().wait()
            return
        async with aclosing(self._probe(probe, ProbeState(passed=True))) as states:
            async for state in states:
                if not state.passed:
                    return

    async def _probe(self, probe: Probe, state: ProbeState) -> AsyncGenerator[ProbeState, None]:
        prober = build_prober(probe, self.state.pod_ip)
        try:
            await asyncio.sleep(probe.initial_delay_s)
            while True:
                state = state.record(probe, await prober.check())
                yield state
                await asyncio.sleep(probe.period_s)
        finally:
            await prober.close()

    async def _wait_for_stop(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop_requested.wait()
        return self._stop_requested.is_set()

    def _update(self, **observed: object) -> None:
        for name, value in observed.items():
            setattr(self.state, name, value)
        self._on_change()


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
