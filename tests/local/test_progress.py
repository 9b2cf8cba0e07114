import io
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from cleave.cli.local.progress import progress
from cleave.local import progress as local_progress
from cleave.local import status
from cleave.local.progress import End, Outcome, Step, follow, judge
from cleave.local.state import PodView, Snapshot, StateFolder
from cleave.local.status import Row
from cleave.rpc.v1 import agent_pb2

LOADING = PodView("p", "prefill", "127.0.0.1:1", 1, False, 0, "", None, 100.0)
READY = replace(LOADING, ready=True)


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    (tmp_path / "chat" / "logs").mkdir(parents=True)
    return StateFolder(tmp_path / "chat")


def of(*pods: PodView) -> Snapshot:
    return Snapshot("chat", 1, "", pods)


def test_states_unlike_ready_are_named_for_people() -> None:
    row = Row("p", "prefill", "starting", restarts=1)
    shown = local_progress.step(LOADING, row, "loading weights", 107.0)
    assert shown == Step("p", "prefill", "loading", 7.0, "loading weights", 1)


def test_the_last_failure_of_an_engine_goes_with_its_pod() -> None:
    stated = agent_pb2.Registration(restarts=2, last_failure="engine ended with status 1: oh")
    health = agent_pb2.HealthResponse(registration=stated)
    row = status.row(LOADING, of(LOADING), health)
    assert row.last_failure == "engine ended with status 1: oh"
    shown = local_progress.step(LOADING, row, "", 107.0)
    assert local_progress.failures([], [shown]) == ["p: engine ended with status 1: oh"]
    assert local_progress.failures([shown], [shown]) == []
    again = replace(shown, restarts=3)
    assert local_progress.failures([shown], [again]) == ["p: engine ended with status 1: oh"]
    end = judge(of(LOADING), [again], StateFolder(Path("/none")))
    assert end
    assert end.reason == "p has lost its engine 3 times: engine ended with status 1: oh"


def test_a_pod_that_ended_says_so_without_its_agent() -> None:
    row = status.row(replace(LOADING, last_exit_code=137), of(LOADING), None)
    assert row.last_failure == "ended with exit code 137"


def test_of_many_that_are_waited_for_some_are_named() -> None:
    steps = [Step(f"p-{n}", "prefill", "loading", 7.2, "x" * 200) for n in range(6)]
    steps[0] = replace(steps[0], state="ready")
    line = local_progress.waiting(steps)
    assert line.startswith("still waiting: p-1 loading 7 s (last log line: xxx")
    assert line.endswith("x...), and 1 more")
    assert local_progress.waiting([]) == "still waiting: no pod was started yet"
    assert local_progress.waiting(steps[:1]) == "still waiting: for readiness probes"


@pytest.mark.parametrize(
    "logged",
    [
        "2026-11-23 05:25:18,346 INFO p-0: loading weights",
        "[engine] (EngineCore pid=2) INFO 11-23 05:30:03 [core.py:133] loading weights",
        "[engine] loading weights",
    ],
)
def test_what_is_waited_for_comes_without_the_beginnings_of_log_lines(logged: str) -> None:
    line = local_progress.waiting([Step("p-0", "prefill", "loading", 7.2, logged)])
    assert line == "still waiting: p-0 loading 7 s (last log line: loading weights)"


def test_the_wait_ends_when_all_are_ready(folder: StateFolder) -> None:
    assert judge(of(), [], folder) is None
    assert judge(of(READY, LOADING), [], folder) is None
    assert judge(of(READY, READY), [], folder) == End(Outcome.READY)


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_a_pod_may_restart_a_few_times(folder: StateFolder, restarts: int) -> None:
    again = replace(LOADING, restarts=restarts, last_exit_code=1)
    assert judge(of(again), [Step("p", "prefill", "loading", 1, "", restarts)], folder) is None


def test_a_pod_that_refuses_its_arguments_is_given_up_at_once(folder: StateFolder) -> None:
    folder.log("p").write_text("core 0 is taken\n")
    end = judge(of(replace(LOADING, last_exit_code=2)), [], folder)
    assert end == End(Outcome.FAILED, "p ended with exit code 2", ["core 0 is taken"])


def test_a_worker_whose_engine_never_stays_up_is_given_up(folder: StateFolder) -> None:
    folder.log("p").write_text("no such flag\n")
    end = judge(of(LOADING), [Step("p", "prefill", "loading", 9, "", 3)], folder)
    assert end == End(Outcome.FAILED, "p has lost its engine 3 times", ["no such flag"])


async def test_a_supervisor_that_started_nothing_in_time_is_told(folder: StateFolder) -> None:
    folder.log("supervisor").write_text("still importing\n")
    with folder.lock():
        folder.write(of())
        end = await follow(folder, lambda _: None, 0)
    assert end.reason == "not ready within 0 s: no pod was started"
    assert end.log == ["still importing"]


def test_a_pod_that_only_its_agent_calls_ready_is_late_too(folder: StateFolder) -> None:
    steps = [Step("p", "prefill", "ready", 1, "")]
    end = local_progress.late(folder, of(LOADING), steps, 1)
    assert end.reason == "not ready within 1 s: p (ready)"


def test_what_happens_to_pods_that_were_ready_is_told() -> None:
    back = replace(READY, restarts=1, last_exit_code=137)
    looks = list(map(of, (READY, LOADING, back, back)))
    assert [local_progress.changes(*pair) for pair in pairwise(looks)] == [
        ["p is not ready"],
        ["p was restarted after exit code 137", "p is ready again"],
        [],
    ]


async def test_an_old_failure_is_told_once_when_an_agent_misses_an_answer(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated = agent_pb2.Registration(restarts=2, last_failure="engine ended with status 1: oh")
    health = agent_pb2.HealthResponse(registration=stated)
    again = agent_pb2.HealthResponse(registration=stated)
    again.registration.restarts = 3
    answers = iter([health, None, None, health, again])

    async def rows(snapshot: Snapshot) -> list[Row]:
        return [status.row(pod, snapshot, next(answers)) for pod in snapshot.pods]

    monkeypatch.setattr(status, "rows", rows)
    out, steps, found = io.StringIO(), [], []
    with progress(Console(file=out, width=80)) as show:
        for pod in (LOADING, LOADING, READY, READY, READY):
            known, steps = (
                steps,
                await local_progress._steps(folder, of(pod), steps, asks_ready=True),
            )
            found.append(local_progress.failures(known, steps))
            show(steps)
    line = "p: engine ended with status 1: oh"
    assert found == [[line], [], [], [], [line]]
    assert out.getvalue().count(line) == 2
