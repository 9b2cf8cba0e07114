"""Following a deployment while it comes up: what each pod does now, and when to give up.

Used by `up` in the foreground and detached alike; both read the state folder. Judging is pure. What
is hard: a pod that restarts may still come up, one whose arguments are refused never will.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from cleave.local import instances, logs
from cleave.local.instances import Row
from cleave.local.state import PodView, Snapshot, StateFolder
from cleave.pods.labels import GATEWAY

REFUSED_EXIT_CODE = 2
"""A worker's exit code for arguments or cores it refuses: starting again changes nothing."""
_RESTARTS_ALLOWED = 3
_LOOK_PERIOD_S = 0.25
_WATCH_PERIOD_S = 0.5
_LOG_LINES = 12
READY = "ready"
LOADING = "loading"


class Outcome(StrEnum):
    """How the wait ended."""

    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class End:
    """The end of the wait."""

    outcome: Outcome
    reason: str = ""
    log: Sequence[str] = ()
    """Last lines of the log of the pod to blame."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one pod does while the deployment comes up."""

    pod: str
    role: str
    state: str
    elapsed_s: float
    detail: str
    """While it loads the last line of its log, else the reason it gives."""
    restarts: int = 0
    """Of the pod and of its engine."""


Show = Callable[[Sequence[Step]], None]


async def follow(folder: StateFolder, show: Show, timeout_s: float) -> End:
    """Show each step until all pods are ready, one has failed or `timeout_s` is over."""
    deadline = time.monotonic() + timeout_s
    steps: Sequence[Step] = ()
    while True:
        snapshot = folder.read()
        if snapshot is None:
            return End(Outcome.STOPPED)
        if not folder.is_held():
            return _supervisor_ended(folder)
        steps = await _steps(folder, snapshot, steps)
        show(steps)
        if end := judge(snapshot, steps, folder):
            return end
        if time.monotonic() > deadline:
            return late(folder, snapshot, steps, timeout_s)
        await asyncio.sleep(_LOOK_PERIOD_S)


def judge(snapshot: Snapshot, steps: Sequence[Step], folder: StateFolder) -> End | None:
    """The end, when snapshot or steps show one."""
    if snapshot.fault:
        return End(Outcome.FAILED, snapshot.fault)
    if snapshot.stopping:
        return End(Outcome.STOPPED)
    for pod in snapshot.pods:
        if pod.last_exit_code == REFUSED_EXIT_CODE or pod.restarts >= _RESTARTS_ALLOWED:
            return _failed(folder, pod.name, f"ended with exit code {pod.last_exit_code}")
    for each in steps:
        # A worker outlives its engine and starts it again, also one that refuses its arguments.
        if each.restarts >= _RESTARTS_ALLOWED:
            return _failed(folder, each.pod, f"has lost its engine {each.restarts} times")
    if snapshot.pods and all(pod.ready for pod in snapshot.pods):
        return End(Outcome.READY)
    return None


def late(folder: StateFolder, snapshot: Snapshot, steps: Sequence[Step], timeout_s: float) -> End:
    """The end when the time is over."""
    # The kubelet decides: an agent may say that it is ready before a probe has heard of it.
    waiting = {pod.name for pod in snapshot.pods if not pod.ready}
    missing = [each for each in steps if each.pod in waiting]
    names = ", ".join(f"{each.pod} ({each.state})" for each in missing[:4]) or "no pod was started"
    log = logs.tail(folder.log(missing[0].pod if missing else "supervisor"), _LOG_LINES)
    return End(Outcome.FAILED, f"not ready within {timeout_s:.0f} s: {names}", log)


def changes(before: Snapshot, after: Snapshot) -> list[str]:
    """What happened to pods between two looks at a deployment that was ready, a line each."""
    known = {pod.name: pod for pod in before.pods}
    found = []
    for pod in after.pods:
        was = known.get(pod.name, pod)
        if pod.restarts > was.restarts:
            found.append(f"{pod.name} was started again after exit code {pod.last_exit_code}")
        if was.ready != pod.ready:
            found.append(f"{pod.name} is {'ready again' if pod.ready else 'not ready'}")
    return found


async def watch(folder: StateFolder, tell: Callable[[str], None]) -> None:
    """Tell what happens to a deployment's pods until it is stopped."""
    before = folder.read()
    while before is not None and not before.stopping:
        await asyncio.sleep(_WATCH_PERIOD_S)
        after = folder.read()
        for line in changes(before, after) if after and not after.stopping else ():
            tell(line)
        before = after


def step(pod: PodView, row: Row, last_log_line: str, now: float) -> Step:
    """What `pod` does, from its row of status and its log. `now` in seconds since the epoch."""
    state = row.state if not pod.ready else READY
    if state == "starting" and pod.role != GATEWAY:
        state = LOADING
    detail = (last_log_line if state == LOADING else "") or row.reason
    return Step(pod.name, pod.role, state, now - pod.admitted_at, detail, row.restarts)


async def _steps(folder: StateFolder, snapshot: Snapshot, before: Sequence[Step]) -> list[Step]:
    """Steps of all pods. A pod that stays ready is not asked again and keeps the time it took."""
    settled = {each.pod: each for each in before if each.state == READY}
    kept = {
        pod.name: settled[pod.name] for pod in snapshot.pods if pod.ready and pod.name in settled
    }
    rest = tuple(pod for pod in snapshot.pods if pod.name not in kept)
    rows = await instances.rows(replace(snapshot, pods=rest))
    now = time.time()
    fresh = {
        pod.name: step(pod, row, "".join(logs.tail(folder.log(pod.name), 1)), now)
        for pod, row in zip(rest, rows, strict=True)
    }
    return [(kept | fresh)[pod.name] for pod in snapshot.pods]


def _supervisor_ended(folder: StateFolder) -> End:
    log = logs.tail(folder.log("supervisor"), _LOG_LINES)
    return End(Outcome.FAILED, "the supervisor ended", log)


def _failed(folder: StateFolder, pod: str, what: str) -> End:
    return End(Outcome.FAILED, f"{pod} {what}", logs.tail(folder.log(pod), _LOG_LINES))
