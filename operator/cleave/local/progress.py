"""Start-up progress of a deployment: the state of each pod, and when the start has failed.

Used by `up`, in the foreground and detached; both read the state folder. `judge` is pure. What is
hard: a pod that restarts may still become ready; one whose arguments are invalid never will.
"""

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from cleave.local import status
from cleave.local.kubelet import logs
from cleave.local.state import PodView, Snapshot, StateFolder
from cleave.local.status import Row
from cleave.manifests.labels import GATEWAY

REFUSED_EXIT_CODE = 2
"""A worker's exit code for invalid arguments or unavailable cores: a restart cannot help."""
_RESTARTS_ALLOWED = 3
_LOOK_PERIOD_S = 0.25
_WATCH_PERIOD_S = 0.5
_ASK_PERIOD_S = 2.0
"""Interval of health requests to the agents of a deployment that is ready."""
_LOG_LINES = 12
_WAITING_SHOWN = 4
_DETAIL_WIDTH = 60
_RECORD = re.compile(
    r"^(?:\[engine\] |\(\w+ pid=\d+\) |[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] "
    r"|\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ [\w.-]+: )*"
)
"""The prefix of messages in the logs of agents and vLLM."""
READY = "ready"
LOADING = "loading"


class Outcome(StrEnum):
    """How the wait ended."""

    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class End:
    """The result of the wait."""

    outcome: Outcome
    reason: str = ""
    log: Sequence[str] = ()
    """Last log lines of the pod that failed."""


@dataclass(frozen=True, slots=True)
class Step:
    """The progress of one pod during start-up."""

    pod: str
    role: str
    state: str
    elapsed_s: float
    detail: str
    """The last line of its log while it loads, else the reason of its state."""
    restarts: int = 0
    """Restarts of the pod and of its engine."""
    last_failure: str = ""
    """Reason of the last restart."""


Show = Callable[[Sequence[Step]], None]


async def follow(folder: StateFolder, show: Show, timeout_s: float) -> End:
    """Show progress until all pods are ready, one has failed or `timeout_s` has passed."""
    deadline = time.monotonic() + timeout_s
    steps: Sequence[Step] = ()
    while True:
        snapshot = folder.read()
        if snapshot is None:
            return End(Outcome.STOPPED)
        if not folder.is_held():
            return _supervisor_ended(folder)
        steps = await _steps(folder, snapshot, steps, asks_ready=False)
        show(steps)
        if end := judge(snapshot, steps, folder):
            return end
        if time.monotonic() > deadline:
            return late(folder, snapshot, steps, timeout_s)
        await asyncio.sleep(_LOOK_PERIOD_S)


def judge(snapshot: Snapshot, steps: Sequence[Step], folder: StateFolder) -> End | None:
    """The result, if snapshot and steps determine it."""
    if snapshot.fault:
        return End(Outcome.FAILED, snapshot.fault)
    if snapshot.stopping:
        return End(Outcome.STOPPED)
    for pod in snapshot.pods:
        if pod.last_exit_code == REFUSED_EXIT_CODE or pod.restarts >= _RESTARTS_ALLOWED:
            return _failed(folder, pod.name, f"ended with exit code {pod.last_exit_code}")
    for each in steps:
        # A worker outlives its engine and restarts it, even if the engine rejects its arguments.
        if each.restarts >= _RESTARTS_ALLOWED:
            why = f": {each.last_failure}" if each.last_failure else ""
            return _failed(folder, each.pod, f"has lost its engine {each.restarts} times{why}")
    if snapshot.pods and all(pod.ready for pod in snapshot.pods):
        return End(Outcome.READY)
    return None


def late(folder: StateFolder, snapshot: Snapshot, steps: Sequence[Step], timeout_s: float) -> End:
    """The result after the timeout."""
    # The kubelet decides: an agent may report readiness before the next probe.
    waiting = {pod.name for pod in snapshot.pods if not pod.ready}
    missing = [each for each in steps if each.pod in waiting]
    names = ", ".join(f"{each.pod} ({each.state})" for each in missing[:4]) or "no pod was started"
    log = logs.tail(folder.log(missing[0].pod if missing else "supervisor"), _LOG_LINES)
    return End(Outcome.FAILED, f"not ready within {timeout_s:.0f} s: {names}", log)


def failures(before: Sequence[Step], after: Sequence[Step]) -> list[str]:
    """Restarts of pods and engines between two polls, one line each with the cause."""
    known = {each.pod: each.restarts for each in before}
    return [
        f"{each.pod}: {each.last_failure}"
        for each in after
        if each.last_failure and each.restarts > known.get(each.pod, 0)
    ]


def waiting(steps: Sequence[Step]) -> str:
    """One line that names the pods that are not ready."""
    missing = [each for each in steps if each.state != READY]
    if not missing:
        return f"still waiting: {'for readiness probes' if steps else 'no pod was started yet'}"
    shown = (f"{each.pod} {_describe(each)}" for each in missing[:_WAITING_SHOWN])
    more = len(missing) - _WAITING_SHOWN
    rest = f", and {more} more" if more > 0 else ""
    return f"still waiting: {', '.join(shown)}{rest}"


def _describe(step: Step) -> str:
    detail = _RECORD.sub("", step.detail)
    if len(detail) > _DETAIL_WIDTH:
        detail = f"{detail[: _DETAIL_WIDTH - 3]}..."
    start = f", restart {step.restarts}" if step.restarts else ""
    last = f" (last log line: {detail})" if detail else ""
    return f"{step.state} {step.elapsed_s:.0f} s{start}{last}"


def changes(before: Snapshot, after: Snapshot) -> list[str]:
    """Changes of pods between two polls of a deployment that was ready, one line each."""
    known = {pod.name: pod for pod in before.pods}
    found = []
    for pod in after.pods:
        was = known.get(pod.name, pod)
        if pod.restarts > was.restarts:
            found.append(f"{pod.name} was restarted after exit code {pod.last_exit_code}")
        if was.ready != pod.ready:
            found.append(f"{pod.name} is {'ready again' if pod.ready else 'not ready'}")
    return found


async def watch(folder: StateFolder, tell: Callable[[str], None]) -> None:
    """Report changes of a deployment's pods and engines until it is stopped."""
    before = folder.read()
    steps: Sequence[Step] = await _steps(folder, before, (), asks_ready=True) if before else ()
    asked_at = time.monotonic()
    while before is not None and not before.stopping:
        await asyncio.sleep(_WATCH_PERIOD_S)
        after = folder.read()
        if after and not after.stopping:
            lines = changes(before, after)
            # An engine may restart between two probes, so agents are polled as well.
            if lines or time.monotonic() - asked_at >= _ASK_PERIOD_S:
                known = steps
                steps = await _steps(folder, after, known, asks_ready=True)
                asked_at = time.monotonic()
                lines += failures(known, steps)
            for line in lines:
                tell(line)
        before = after


def step(pod: PodView, row: Row, last_log_line: str, now: float) -> Step:
    """The progress of `pod` from its row of status and its log; `now`: seconds since the epoch."""
    state = row.state if not pod.ready else READY
    if state == "starting" and pod.role != GATEWAY:
        state = LOADING
    detail = (last_log_line if state == LOADING else "") or row.reason
    elapsed_s = now - pod.admitted_at
    return Step(pod.name, pod.role, state, elapsed_s, detail, row.restarts, row.last_failure)


async def _steps(
    folder: StateFolder, snapshot: Snapshot, before: Sequence[Step], *, asks_ready: bool
) -> list[Step]:
    """Steps of all pods; without `asks_ready`, a pod that stays ready keeps its previous step."""
    known = {each.pod: each for each in before}
    kept = {
        pod.name: known[pod.name]
        for pod in snapshot.pods
        if not asks_ready and pod.ready and pod.name in known and known[pod.name].state == READY
    }
    rest = tuple(pod for pod in snapshot.pods if pod.name not in kept)
    rows = await status.rows(replace(snapshot, pods=rest))
    now = time.time()
    fresh = {
        pod.name: step(pod, _counted(row, known), "".join(logs.tail(folder.log(pod.name), 1)), now)
        for pod, row in zip(rest, rows, strict=True)
    }
    return [(kept | fresh)[pod.name] for pod in snapshot.pods]


def _counted(row: Row, known: Mapping[str, Step]) -> Row:
    """Keep the previous count of restarts if the agent, which counts them, does not respond."""
    before = known.get(row.instance)
    if before is None or row.epoch is not None:
        return row
    return replace(row, restarts=max(row.restarts, before.restarts))


def _supervisor_ended(folder: StateFolder) -> End:
    log = logs.tail(folder.log("supervisor"), _LOG_LINES)
    return End(Outcome.FAILED, "the supervisor ended", log)


def _failed(folder: StateFolder, pod: str, what: str) -> End:
    return End(Outcome.FAILED, f"{pod} {what}", logs.tail(folder.log(pod), _LOG_LINES))
