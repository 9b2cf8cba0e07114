import asyncio
import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from cleave.cli.local.progress import show_startup
from cleave.local import progress as local_progress
from cleave.local import status
from cleave.local.progress import (
    PodProgress,
    StartupOutcome,
    StartupResult,
    check_finished,
    wait_until_ready,
)
from cleave.local.state import DeploymentSnapshot, PodView, StateFolder
from cleave.local.status import InstanceRow
from cleave.rpc.v1 import agent_pb2

LOADING = PodView("p", "prefill", "127.0.0.1:1", 1, False, 0, "", None, 100.0)
READY = replace(LOADING, ready=True)


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    (tmp_path / "chat" / "logs").mkdir(parents=True)
    return StateFolder(tmp_path / "chat")


def of(*pods: PodView) -> DeploymentSnapshot:
    return DeploymentSnapshot("chat", 1, "", pods)


def test_states_other_than_ready_have_readable_names() -> None:
    row = InstanceRow("p", "prefill", "starting", restarts=1)
    shown = local_progress.build_progress(LOADING, row, "loading weights", 107.0)
    expected = PodProgress("p", "prefill", "loading", 7.0, "loading weights", 1, is_serving=False)
    assert shown == expected


def test_the_stage_of_a_start_is_known_from_the_agent() -> None:
    row = InstanceRow("p", "prefill", "starting", reason="engine starts: loads weights, 40 %")
    shown = local_progress.build_progress(LOADING, row, "a line", 107.0)
    assert (shown.stage, shown.detail) == ("loads weights, 40 %", "a line")
    line = local_progress.describe_waiting([shown])
    assert line == "still waiting: p loading 7 s, loads weights, 40 % (last log line: a line)"
    for reason in ("engine starts", "engine starts again: no such model: x", "engine: y"):
        row = InstanceRow("p", "prefill", "starting", reason=reason)
        assert local_progress.build_progress(LOADING, row, "a line", 107.0).stage == ""


def test_the_last_failure_of_an_engine_goes_with_its_pod() -> None:
    registration = agent_pb2.Registration(restarts=2, last_failure="engine ended with status 1: oh")
    health = agent_pb2.HealthResponse(registration=registration)
    row = status.build_row(LOADING, of(LOADING), health)
    assert row.last_failure == "engine ended with status 1: oh"
    shown = local_progress.build_progress(LOADING, row, "", 107.0)
    assert local_progress.describe_restarts([], [shown]) == ["p: engine ended with status 1: oh"]
    assert local_progress.describe_restarts([shown], [shown]) == []
    again = replace(shown, restarts=3)
    assert local_progress.describe_restarts([shown], [again]) == [
        "p: engine ended with status 1: oh"
    ]
    end = check_finished(of(LOADING), [again], StateFolder(Path("/none")))
    assert end
    assert end.reason == "p has lost its engine 3 times: engine ended with status 1: oh"


def test_a_pod_that_ended_says_so_without_its_agent() -> None:
    row = status.build_row(replace(LOADING, last_exit_code=137), of(LOADING), None)
    assert row.last_failure == "ended with exit code 137 (SIGKILL)"


def test_of_many_that_are_waited_for_some_are_named() -> None:
    steps = [PodProgress(f"p-{n}", "prefill", "loading", 7.2, "x" * 200) for n in range(6)]
    steps[0] = replace(steps[0], state="ready")
    line = local_progress.describe_waiting(steps)
    assert line.startswith("still waiting: p-1 loading 7 s (last log line: xxx")
    assert line.endswith("x...), and 1 more")
    assert local_progress.describe_waiting([]) == "still waiting: no pod was started yet"
    assert local_progress.describe_waiting(steps[:1]) == "still waiting: for readiness probes"


@pytest.mark.parametrize(
    "logged",
    [
        "2026-11-23 05:25:18,346 INFO p-0: loading weights",
        "[engine] (EngineCore pid=2) INFO 11-23 05:30:03 [core.py:133] loading weights",
        "[engine] loading weights",
    ],
)
def test_what_is_waited_for_comes_without_the_beginnings_of_log_lines(logged: str) -> None:
    line = local_progress.describe_waiting([PodProgress("p-0", "prefill", "loading", 7.2, logged)])
    assert line == "still waiting: p-0 loading 7 s (last log line: loading weights)"


def test_the_wait_ends_when_all_are_ready(folder: StateFolder) -> None:
    assert check_finished(of(), [], folder) is None
    assert check_finished(of(READY, LOADING), [], folder) is None
    assert check_finished(of(READY, READY), [], folder) == StartupResult(StartupOutcome.READY)


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_a_pod_may_restart_a_few_times(folder: StateFolder, restarts: int) -> None:
    again = replace(LOADING, restarts=restarts, last_exit_code=1)
    assert (
        check_finished(of(again), [PodProgress("p", "prefill", "loading", 1, "", restarts)], folder)
        is None
    )


def test_a_pod_that_refuses_its_arguments_is_given_up_at_once(folder: StateFolder) -> None:
    folder.get_log_path("p").write_text("core 0 is taken\n")
    end = check_finished(of(replace(LOADING, last_exit_code=2)), [], folder)
    assert end == StartupResult(
        StartupOutcome.FAILED, "p ended with exit code 2", ["core 0 is taken"]
    )


def test_a_worker_whose_engine_never_stays_up_is_given_up(folder: StateFolder) -> None:
    folder.get_log_path("p").write_text("no such flag\n")
    end = check_finished(of(LOADING), [PodProgress("p", "prefill", "loading", 9, "", 3)], folder)
    assert end == StartupResult(
        StartupOutcome.FAILED, "p has lost its engine 3 times", ["no such flag"]
    )


async def test_a_supervisor_that_started_nothing_in_time_is_reported(folder: StateFolder) -> None:
    folder.get_log_path("supervisor").write_text("still importing\n")
    with folder.lock():
        folder.write(of())
        end = await wait_until_ready(folder, lambda _: None, 0)
    assert end.reason == "not ready within 0 s: no pod was started"
    assert end.log == ["still importing"]


def test_a_pod_that_only_its_agent_calls_ready_is_late_too(folder: StateFolder) -> None:
    steps = [PodProgress("p", "prefill", "ready", 1, "")]
    end = local_progress.build_timeout_result(folder, of(LOADING), steps, 1)
    assert end.reason == "not ready within 1 s: p (ready)"


def test_changes_of_pods_that_were_ready_are_reported() -> None:
    back = replace(READY, restarts=1, last_exit_code=137)
    looks = list(map(of, (READY, LOADING, back, back)))
    assert [local_progress.describe_changes(*pair) for pair in pairwise(looks)] == [
        ["p is not ready"],
        ["p was restarted after exit code 137 (SIGKILL)", "p is ready again"],
        [],
    ]


def test_a_pod_that_serves_again_after_a_restart_is_reported() -> None:
    ready = PodProgress("p", "prefill", "ready", 1, "")
    lost = replace(ready, restarts=1, is_serving=False)
    back = replace(lost, is_serving=True)
    line = ["p: serves again (restart 1)"]
    found = [
        local_progress.describe_returns([before], [after])
        for before, after in (
            (ready, lost),
            (lost, lost),
            (lost, back),
            (back, back),
            (ready, back),
        )
    ]
    assert found == [[], [], line, [], line]


async def test_an_old_failure_is_reported_once_when_an_agent_misses_a_poll(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    registration = agent_pb2.Registration(restarts=2, last_failure="engine ended with status 1: oh")
    health = agent_pb2.HealthResponse(registration=registration)
    again = agent_pb2.HealthResponse(registration=registration)
    again.registration.restarts = 3
    answers = iter([health, None, None, health, again])

    async def rows(snapshot: DeploymentSnapshot) -> list[InstanceRow]:
        return [status.build_row(pod, snapshot, next(answers)) for pod in snapshot.pods]

    monkeypatch.setattr(status, "collect_rows", rows)
    out, steps, found = io.StringIO(), [], []
    with show_startup(Console(file=out, width=80)) as show:
        for pod in (LOADING, LOADING, READY, READY, READY):
            known, steps = (
                steps,
                await local_progress._collect_progress(folder, of(pod), steps, refresh_ready=True),
            )
            found.append(local_progress.describe_restarts(known, steps))
            show(steps)
    line = "p: engine ended with status 1: oh"
    assert found == [[line], [], [], [], [line]]
    assert out.getvalue().count(line) == 2


@pytest.mark.parametrize(("shown", "reported"), [(0, True), (1, False)])
async def test_what_happens_before_the_watch_begins_is_reported_once(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch, shown: int, reported: bool
) -> None:
    failure = "engine ended with status 137"
    health = agent_pb2.HealthResponse()
    health.registration.restarts, health.registration.last_failure = 1, failure
    health.registration.state = agent_pb2.STATE_STARTING

    async def rows(snapshot: DeploymentSnapshot) -> list[InstanceRow]:
        folder.write(replace(of(READY), stopping=True))
        return [status.build_row(pod, snapshot, health) for pod in snapshot.pods]

    monkeypatch.setattr(status, "collect_rows", rows)
    lines: list[str] = []
    folder.write(of(LOADING))
    steps = [PodProgress("p", "prefill", "ready", 1, "", shown)]
    start = local_progress.StartupView(of(READY), steps)
    async with asyncio.timeout(10):
        await local_progress.watch_pods(folder, start, lines.append)
    assert lines == ["p is not ready", *([f"p: {failure}"] if reported else [])]
