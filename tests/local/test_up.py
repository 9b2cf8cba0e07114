import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cleave.local import state
from cleave.local.errors import DeploymentStartError, StateError
from cleave.local.kubelet.kubelet import Kubelet
from cleave.local.kubelet.node import LocalNode
from cleave.local.launch_plan import LaunchPlan
from cleave.local.progress import PodProgress
from cleave.local.up import check_can_start, run_in_foreground, start_detached, stop_deployment
from cleave.shm.core_locks import get_lock_file

from tests.support.ports import find_free_port

Until = Callable[[Callable[[], object]], Awaitable[None]]
PodBuilder = Callable[..., dict[str, Any]]
SLEEP = "import time; time.sleep(600)"
REPORTS_ITS_END = """
import signal, sys, time, pathlib
def end(*_):
    with open({log!r}, "a") as file: file.write({name!r} + " ")
    sys.exit(0)
signal.signal(15, end)
pathlib.Path({up!r}).touch()
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def state_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLEAVE_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def free_port() -> int:
    return find_free_port()


@pytest.fixture
def job(pod: PodBuilder, node: LocalNode, free_port: int) -> Callable[..., LaunchPlan]:
    def build(*pods: dict[str, Any]) -> LaunchPlan:
        return LaunchPlan("chat", "chat", free_port, 0, node, pods or (pod("chat-gateway", SLEEP),))

    return build


@pytest.fixture
async def leave_nothing() -> AsyncIterator[None]:
    yield
    for folder in state.list_running():
        await stop_deployment(folder, 5)


def unseen() -> AbstractContextManager[Callable[[Sequence[PodProgress]], None]]:
    return nullcontext(lambda _: None)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


async def test_a_deployment_runs_inside_the_block_and_nothing_is_left_after_it(
    job: Callable[..., LaunchPlan],
) -> None:
    async with run_in_foreground(job(), unseen(), 20):
        (folder,) = state.list_running()
        snapshot = folder.read()
        assert snapshot is not None
        (pod,) = snapshot.pods
        assert pod.ready
        assert alive(pod.pid or 0)
    assert not alive(pod.pid or 0)
    assert state.list_running() == []
    assert folder.read() is None


async def test_a_deployment_comes_up_once(job: Callable[..., LaunchPlan]) -> None:
    async with run_in_foreground(job(), unseen(), 20):
        with pytest.raises(StateError, match="chat is already running"):
            async with run_in_foreground(job(), unseen(), 20):
                pass


async def test_the_gateway_ends_first_then_decode_then_prefill(
    pod: PodBuilder, job: Callable[..., LaunchPlan], tmp_path: Path, until: Until
) -> None:
    log = tmp_path / "ends"

    def built(name: str, component: str, role: str) -> dict[str, Any]:
        code = REPORTS_ITS_END.format(log=str(log), name=name, up=str(tmp_path / f"{name}.up"))
        labels = {"cleave.dev/component": component, "cleave.dev/role": role}
        return pod(name, code, labels=labels)

    pods = [
        built("p", "worker", "prefill"),
        built("d", "worker", "decode"),
        built("g", "gateway", ""),
    ]
    async with run_in_foreground(job(*pods), unseen(), 20):
        await until(lambda: len(list(tmp_path.glob("*.up"))) == 3)
    assert log.read_text().split() == ["g", "d", "p"]


async def test_a_pod_that_refuses_its_arguments_ends_the_wait_with_its_last_words(
    pod: PodBuilder, job: Callable[..., LaunchPlan]
) -> None:
    refusing = pod("w", "import sys; sys.exit(print('core 0 is taken') or 2)")
    never = {"httpGet": {"port": 1}}
    refusing["spec"]["containers"][0]["readinessProbe"] = never
    with pytest.raises(DeploymentStartError, match="w ended with exit code 2") as raised:
        async with run_in_foreground(job(refusing), unseen(), 60):
            pass
    assert raised.value.log_tail == ["core 0 is taken"]
    assert state.list_running() == []


async def test_the_wait_for_readiness_is_bounded(
    pod: PodBuilder, job: Callable[..., LaunchPlan]
) -> None:
    slow = pod("w", SLEEP, container={"readinessProbe": {"httpGet": {"port": 1}}})
    with pytest.raises(DeploymentStartError, match=r"not ready within 1 s: w \("):
        async with run_in_foreground(job(slow), unseen(), 1):
            pass
    assert state.list_running() == []


async def test_ctrl_c_while_loading_ends_everything(
    pod: PodBuilder, job: Callable[..., LaunchPlan]
) -> None:
    slow = pod("w", SLEEP, container={"readinessProbe": {"httpGet": {"port": 1}}})

    def interrupt(steps: Sequence[PodProgress]) -> None:
        if steps:
            os.kill(os.getpid(), signal.SIGINT)

    async with run_in_foreground(job(slow), nullcontext(interrupt), 60) as (supervisor, _):
        assert supervisor.is_stopping
    assert state.list_running() == []


async def test_a_detached_deployment_outlives_its_command_until_down(
    job: Callable[..., LaunchPlan], leave_nothing: None
) -> None:
    await start_detached(job(), unseen(), 60)
    folder = state.find_running("chat")
    snapshot = folder.read()
    assert snapshot is not None
    assert snapshot.supervisor_pid != os.getpid()
    pids = [snapshot.supervisor_pid, *(pod.pid or 0 for pod in snapshot.pods)]
    assert all(map(alive, pids))
    assert {file.stat().st_mode & 0o077 for file in (folder.path, *folder.path.rglob("*"))} == {0}
    await stop_deployment(folder, 20)
    assert not any(map(alive, pids))
    assert sorted(file.name for file in folder.path.iterdir()) == ["lock", "logs"]


async def test_a_detached_deployment_that_fails_leaves_nothing(
    pod: PodBuilder, job: Callable[..., LaunchPlan], leave_nothing: None
) -> None:
    with pytest.raises(DeploymentStartError, match="exit code 2"):
        await start_detached(
            job(
                pod(
                    "w",
                    "raise SystemExit(2)",
                    restartPolicy="Always",
                    container={"readinessProbe": {"httpGet": {"port": 1}}},
                )
            ),
            unseen(),
            60,
        )
    assert state.list_running() == []


async def test_a_supervisor_that_was_killed_does_not_count_as_running(
    job: Callable[..., LaunchPlan], leave_nothing: None, until: Until
) -> None:
    await start_detached(job(), unseen(), 60)
    snapshot = state.find_running("chat").read()
    assert snapshot is not None
    os.kill(snapshot.supervisor_pid, signal.SIGKILL)
    await until(lambda: not state.list_running())
    with pytest.raises(StateError, match="chat is not running: its supervisor was killed"):
        state.find_running("chat")
    assert [folder.name for folder in state.list_orphaned()] == ["chat"]
    await start_detached(job(), unseen(), 60)


async def test_a_placement_that_does_not_fit_is_reported_before_anything_starts(
    pod: PodBuilder, job: Callable[..., LaunchPlan], free_port: int
) -> None:
    big = {"resources": {"requests": {"memory": "10Gi", "cpu": 2}, "limits": {"cpu": 2}}}
    with (
        socket.create_server(("127.0.0.1", free_port)),
        pytest.raises(DeploymentStartError) as raised,
    ):
        check_can_start(job(pod("a", SLEEP, container=big), pod("b", SLEEP, container=big)))
    memory, cores, port = raised.value.faults
    assert memory.startswith("20.0 GiB of memory needed for 2 pods, 16.0 GiB available")
    assert cores.startswith("4 exclusive cores needed, 2 available")
    assert port == f"port {free_port} of 127.0.0.1 is in use; choose another with --port"


def test_cores_that_other_engines_use_are_reported_with_their_holder(
    pod: PodBuilder, job: Callable[..., LaunchPlan], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cleave.local.up.get_lock_folder", lambda: tmp_path)
    get_lock_file(tmp_path, 1).write_text("4711 chat-decode-0\n")
    own = {"resources": {"requests": {"cpu": 2}, "limits": {"cpu": 2}}}
    crowded = job(pod("a", SLEEP, container=own))
    crowded = replace(crowded, node=replace(crowded.node, held_cores=frozenset({1})))
    with pytest.raises(DeploymentStartError) as raised:
        check_can_start(crowded)
    assert raised.value.faults[0].startswith(
        "2 exclusive cores needed, 2 available, 1 used by other engines: process 4711 "
        "(chat-decode-0); use fewer"
    )


def test_an_unreadable_pod_is_reported_before_anything_starts(
    pod: PodBuilder, job: Callable[..., LaunchPlan]
) -> None:
    with pytest.raises(DeploymentStartError, match="pod w: '1 GB' is not a quantity"):
        check_can_start(
            job(pod("w", SLEEP, container={"resources": {"requests": {"memory": "1 GB"}}}))
        )


async def test_a_second_signal_ends_at_once(
    pod: PodBuilder, job: Callable[..., LaunchPlan], tmp_path: Path, until: Until
) -> None:
    up = tmp_path / "up"
    code = (
        "import signal, time, pathlib; signal.signal(15, signal.SIG_IGN); "
        f"pathlib.Path({str(up)!r}).touch(); time.sleep(600)"
    )
    stubborn = pod("w", code, terminationGracePeriodSeconds=600)
    stubborn["metadata"]["labels"] = {"cleave.dev/role": "decode"}
    async with asyncio.timeout(60):
        async with run_in_foreground(job(stubborn), unseen(), 20) as (supervisor, _):
            await until(up.exists)
            supervisor.stop()
            await asyncio.sleep(0.3)
            supervisor.stop()
    assert state.list_running() == []


async def test_a_supervisor_that_breaks_down_is_never_called_ready(
    job: Callable[..., LaunchPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    reached: list[str] = []
    monkeypatch.setattr(Kubelet, "run_pod", full)
    with pytest.raises(OSError, match="no space left"):
        async with run_in_foreground(job(), unseen(), 20):
            reached.append("ready")
    assert reached == []


def test_several_running_deployments_must_be_named(state_root: Path) -> None:
    with pytest.raises(StateError, match="no deployments running"):
        state.find_running(None)
    with state.get_folder("a").lock(), state.get_folder("b").lock():
        with pytest.raises(StateError, match="give one of: a, b"):
            state.find_running(None)
        assert state.find_running("b").name == "b"
