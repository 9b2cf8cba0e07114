"""Start-up progress of a deployment: the state of each pod, and whether the start has failed.

Used by `up`, in the foreground and detached; both read the state folder. `check_finished` is pure.
A pod that restarts may still become ready; one whose arguments are invalid never will.
"""

import asyncio
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from cleave.local import status
from cleave.local.kubelet import logs
from cleave.local.state import DeploymentSnapshot, PodView, StateFolder
from cleave.local.status import InstanceRow
from cleave.manifests.labels import GATEWAY

PERMANENT_FAILURE_EXIT_CODE = 2
"""A worker's exit code for invalid arguments or unavailable cores: a restart cannot help."""
_MAX_RESTARTS = 3
_POLL_INTERVAL_S = 0.25
_WATCH_INTERVAL_S = 0.5
_HEALTH_INTERVAL_S = 2.0
"""Interval of health requests to the agents of a deployment that is ready."""
_LOG_LINES = 12
_MAX_LISTED_PODS = 4
_DETAIL_WIDTH = 60
_LOG_PREFIX = re.compile(
    r"^(?:\[engine\] |\(\w+ pid=\d+\) |[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] "
    r"|\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ [\w.-]+: )*"
)
"""The prefix of messages in the logs of agents and vLLM."""
_STARTS = "engine starts: "
"""Begins the reason of an agent whose engine has said what it does."""
READY = "ready"
LOADING = "loading"


class StartupOutcome(StrEnum):
    """How the wait ended."""

    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class StartupResult:
    """The result of the wait."""

    outcome: StartupOutcome
    reason: str = ""
    log: Sequence[str] = ()
    """Last log lines of the pod that failed."""
    shown: "StartupView | None" = None
    """What was shown last; None: nothing, or the wait timed out."""


@dataclass(frozen=True, slots=True)
class PodProgress:
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
    stage: str = ""
    """What its engine does while it starts, such as `loads weights, 40 %`; empty: not known."""
    is_serving: bool = True
    """Whether its agent, which knows of an outage before the next probe, says that it is ready."""


@dataclass(frozen=True, slots=True)
class StartupView:
    """A deployment as one poll found it."""

    snapshot: DeploymentSnapshot
    steps: Sequence[PodProgress]


ShowProgress = Callable[[Sequence[PodProgress]], None]


async def wait_until_ready(
    folder: StateFolder, show: ShowProgress, timeout_s: float
) -> StartupResult:
    """Show progress until all pods are ready, one has failed or `timeout_s` has passed."""
    deadline = time.monotonic() + timeout_s
    steps: Sequence[PodProgress] = ()
    while True:
        snapshot = await folder.read_restored()
        if snapshot is None:
            return StartupResult(StartupOutcome.STOPPED)
        if not folder.is_running():
            return _build_failure(folder, "supervisor", "the supervisor ended")
        steps = await _collect_progress(folder, snapshot, steps, refresh_ready=False)
        show(steps)
        if end := check_finished(snapshot, steps, folder):
            return replace(end, shown=StartupView(snapshot, steps))
        if time.monotonic() > deadline:
            return build_timeout_result(folder, snapshot, steps, timeout_s)
        await asyncio.sleep(_POLL_INTERVAL_S)


def check_finished(
    snapshot: DeploymentSnapshot, steps: Sequence[PodProgress], folder: StateFolder
) -> StartupResult | None:
    """The result, if snapshot and steps determine it."""
    if snapshot.fault:
        return StartupResult(StartupOutcome.FAILED, snapshot.fault)
    if snapshot.stopping:
        return StartupResult(StartupOutcome.STOPPED)
    for pod in snapshot.pods:
        if pod.last_exit_code == PERMANENT_FAILURE_EXIT_CODE or pod.restarts >= _MAX_RESTARTS:
            fault = f"{pod.name} ended with {pod.last_end}"
            return _build_failure(folder, pod.name, fault)
    for each in steps:
        # A worker outlives its engine and restarts it, even if the engine rejects its arguments.
        if each.restarts >= _MAX_RESTARTS:
            why = f": {each.last_failure}" if each.last_failure else ""
            fault = f"{each.pod} has lost its engine {each.restarts} times{why}"
            return _build_failure(folder, each.pod, fault)
    if snapshot.pods and all(pod.ready for pod in snapshot.pods):
        return StartupResult(StartupOutcome.READY)
    return None


def build_timeout_result(
    folder: StateFolder,
    snapshot: DeploymentSnapshot,
    steps: Sequence[PodProgress],
    timeout_s: float,
) -> StartupResult:
    """The result after the timeout."""
    # The kubelet decides: an agent may report readiness before the next probe.
    waiting = {pod.name for pod in snapshot.pods if not pod.ready}
    missing = [each for each in steps if each.pod in waiting]
    names = ", ".join(f"{each.pod} ({each.state})" for each in missing[:4]) or "no pod was started"
    first = missing[0].pod if missing else "supervisor"
    return _build_failure(folder, first, f"not ready within {timeout_s:.0f} s: {names}")


def describe_restarts(before: Sequence[PodProgress], after: Sequence[PodProgress]) -> list[str]:
    """Restarts of pods and engines between two polls, one line each with the cause."""
    known = {each.pod: each.restarts for each in before}
    return [
        f"{each.pod}: {each.last_failure}"
        for each in after
        if each.last_failure and each.restarts > known.get(each.pod, 0)
    ]


def describe_returns(before: Sequence[PodProgress], after: Sequence[PodProgress]) -> list[str]:
    """Pods that serve again after a restart of the pod or its engine, one line each."""
    known = {each.pod: each for each in before}
    lines = []
    for each in after:
        was = known.get(each.pod, each)
        is_back = not was.is_serving or each.restarts > was.restarts
        if each.is_serving and each.restarts and is_back:
            lines.append(f"{each.pod}: serves again (restart {each.restarts})")
    return lines


def describe_waiting(steps: Sequence[PodProgress]) -> str:
    """One line that names the pods that are not ready."""
    missing = [each for each in steps if each.state != READY]
    if not missing:
        return f"still waiting: {'for readiness probes' if steps else 'no pod was started yet'}"
    shown = (f"{each.pod} {_describe_pod(each)}" for each in missing[:_MAX_LISTED_PODS])
    more = len(missing) - _MAX_LISTED_PODS
    rest = f", and {more} more" if more > 0 else ""
    return f"still waiting: {', '.join(shown)}{rest}"


def _describe_pod(step: PodProgress) -> str:
    detail = _LOG_PREFIX.sub("", step.detail)
    if len(detail) > _DETAIL_WIDTH:
        detail = f"{detail[: _DETAIL_WIDTH - 3]}..."
    start = f", restart {step.restarts}" if step.restarts else ""
    last = f" (last log line: {detail})" if detail else ""
    stage = f", {step.stage}" if step.stage else ""
    return f"{step.state} {step.elapsed_s:.0f} s{stage}{start}{last}"


def describe_changes(before: DeploymentSnapshot, after: DeploymentSnapshot) -> list[str]:
    """Changes of pods between two polls of a deployment that was ready, one line each."""
    known = {pod.name: pod for pod in before.pods}
    lines = []
    for pod in after.pods:
        was = known.get(pod.name, pod)
        if pod.restarts > was.restarts:
            lines.append(f"{pod.name} was restarted after {pod.last_end}")
        if was.ready != pod.ready:
            lines.append(f"{pod.name} is {'ready again' if pod.ready else 'not ready'}")
    return lines


async def watch_pods(
    folder: StateFolder, shown: StartupView, report: Callable[[str], None]
) -> None:
    """Report changes of a deployment's pods and engines since `shown`, until it is stopped."""
    before, steps, polled_at = shown.snapshot, shown.steps, -math.inf
    while (after := await folder.read_restored()) is not None and not after.stopping:
        lines = describe_changes(before, after)
        # An engine may restart between two probes, so agents are polled as well.
        if lines or time.monotonic() - polled_at >= _HEALTH_INTERVAL_S:
            known = steps
            steps = await _collect_progress(folder, after, known, refresh_ready=True)
            polled_at = time.monotonic()
            lines += describe_restarts(known, steps) + describe_returns(known, steps)
        for line in lines:
            report(line)
        before = after
        await asyncio.sleep(_WATCH_INTERVAL_S)


def build_progress(pod: PodView, row: InstanceRow, last_log_line: str, now: float) -> PodProgress:
    """The progress of `pod` from its row of status and its log; `now`: seconds since the epoch."""
    state = row.state if not pod.ready else READY
    if state == "starting" and pod.role != GATEWAY:
        state = LOADING
    detail = (last_log_line if state == LOADING else "") or row.reason
    is_staged = state == LOADING and row.reason.startswith(_STARTS)
    return PodProgress(
        pod=pod.name,
        role=pod.role,
        state=state,
        elapsed_s=now - pod.admitted_at,
        detail=detail,
        restarts=row.restarts,
        last_failure=row.last_failure,
        stage=row.reason.removeprefix(_STARTS) if is_staged else "",
        is_serving=row.state == READY,
    )


async def _collect_progress(
    folder: StateFolder,
    snapshot: DeploymentSnapshot,
    before: Sequence[PodProgress],
    *,
    refresh_ready: bool,
) -> list[PodProgress]:
    """Steps of all pods; without `refresh_ready`, a pod that stays ready keeps its last step."""
    known = {each.pod: each for each in before}
    steps = {
        pod.name: known[pod.name]
        for pod in snapshot.pods
        if not refresh_ready and pod.ready and pod.name in known and known[pod.name].state == READY
    }
    rest = tuple(pod for pod in snapshot.pods if pod.name not in steps)
    rows = await status.collect_rows(replace(snapshot, pods=rest))
    now = time.time()
    for pod, row in zip(rest, rows, strict=True):
        last_line = "".join(logs.tail(folder.get_log_path(pod.name), 1))
        steps[pod.name] = build_progress(pod, _keep_restart_count(row, known), last_line, now)
    return [steps[pod.name] for pod in snapshot.pods]


def _keep_restart_count(row: InstanceRow, known: Mapping[str, PodProgress]) -> InstanceRow:
    """Keep the previous count of restarts if the agent, which counts them, does not respond."""
    before = known.get(row.instance)
    if before is None or row.epoch is not None:
        return row
    return replace(row, restarts=max(row.restarts, before.restarts))


def _build_failure(folder: StateFolder, pod: str, fault: str) -> StartupResult:
    log = logs.tail(folder.get_log_path(pod), _LOG_LINES)
    return StartupResult(StartupOutcome.FAILED, fault, log)
