"""Damaged files of a deployment, running and stopped: each command leads out."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cleave.cli.main import app
from cleave.local import state, up
from cleave.local.files import TOKEN_FILE
from cleave.local.kubelet.node import LocalNode
from cleave.local.launch_plan import LaunchPlan
from cleave.local.state import StateFolder

from tests.support.ports import find_free_port

PodBuilder = Callable[..., dict[str, Any]]
Job = Callable[[], LaunchPlan]
SLEEP = "import time; print('awake', flush=True); time.sleep(600)"


@pytest.fixture(autouse=True)
def state_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLEAVE_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def job(pod: PodBuilder, node: LocalNode) -> Job:
    pods = (pod("chat-gateway", SLEEP), pod("chat-mixed-0", SLEEP))
    port = find_free_port()
    return lambda: LaunchPlan("chat", "chat", port, port + 1, node, pods)


@pytest.fixture(autouse=True)
def leave_nothing() -> Iterator[None]:
    yield
    for folder in state.list_running():
        asyncio.run(up.stop_deployment(folder, 5))


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with the deployment."""
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as process:
        yield process
        process.kill()


def start(job: LaunchPlan) -> tuple[StateFolder, list[int]]:
    """Start it in the background; its folder, and the processes that it has."""
    asyncio.run(up.start_detached(job, nullcontext(lambda _: None), 60))
    folder = state.find_running("chat")
    snapshot = folder.read()
    assert snapshot is not None
    return folder, [snapshot.supervisor_pid, *(pod.pid or 0 for pod in snapshot.pods)]


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*args])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "internal error" not in result.output
    return result.exit_code, result.output


def is_alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def put(text: bytes) -> Callable[[Path], None]:
    return lambda file: file.write_bytes(text) and None


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:40] if file.exists() else b"{")


def replace_by_folder(file: Path) -> None:
    file.unlink(missing_ok=True)
    (file / "inside").mkdir(parents=True)


def replace_by_pipe(file: Path) -> None:
    """A reader that opens it waits for the other side."""
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def replace_by_link(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to(file.parent / "nowhere")


FOREIGN = {"deployment": "code", "supervisor_pid": 1, "url": "http://127.0.0.1:1"}
DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": put(b""),
    "truncated": cut,
    "no JSON": put(b"\xff\x00\xfe"),
    "lists in lists": put(b'{"deployment":"chat","plan":' + b"[" * 100_000),
    "of another version": put(b'{"deployment": "chat", "pods": [{"of": "later"}]}'),
    "of another deployment": put(json.dumps(FOREIGN).encode()),
    "a folder": replace_by_folder,
    "a pipe": replace_by_pipe,
    "a link to nothing": replace_by_link,
    "removed": lambda file: file.unlink(missing_ok=True),
}
by_damage = pytest.mark.parametrize("damage", [*DAMAGES], ids=lambda name: name.replace(" ", "-"))


def test_a_running_deployment_writes_damaged_files_again(job: Job) -> None:
    folder, pids = start(job())
    texts = {name: (folder.path / name).read_text() for name in ("agents", TOKEN_FILE)}
    for damage in DAMAGES.values():
        damage(folder.state_file)
        code, output = run("status", "chat")
        assert code == 0, output
        assert "chat-mixed-0" in output
        assert run("logs", "chat")[1].count("awake") == 2
        with pytest.raises(state.StateError, match=r"chat is already running.*cleave down chat"):
            up.check_can_start(job())
    cut(folder.state_file)
    assert run("top", "chat", "--once")[1].startswith("error: gateway at http://127.0.0.1")
    for name, text in texts.items():
        for damage in (cut, replace_by_folder, replace_by_pipe, lambda file: file.unlink()):
            damage(folder.path / name)
            deadline = time.monotonic() + 20
            while not _has_text(folder.path / name, text) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert _has_text(folder.path / name, text)
    log = folder.get_log_path("supervisor").read_text()
    assert f"{folder.path / TOKEN_FILE} was changed or removed by another program" in log
    assert run("down", "chat") == (0, "chat stopped\n")
    assert not any(map(is_alive, pids))


def _has_text(file: Path, text: str) -> bool:
    return file.is_file() and os.access(file, os.R_OK) and file.read_bytes() == text.encode()


@by_damage
def test_what_hangs_with_a_damaged_file_is_ended_by_down(
    job: Job, damage: str, bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor is stopped, so that it neither restores the file nor ends by SIGTERM."""
    monkeypatch.setattr(up, "_FORCED_STOP_TIMEOUT_S", 0.5)
    monkeypatch.setattr(state, "_RESTORE_TIMEOUT_S", 0.2)
    folder, pids = start(job())
    os.kill(pids[0], signal.SIGSTOP)
    FOREIGN["supervisor_pid"] = bystander.pid
    DAMAGES[damage](folder.state_file)
    if damage != "removed":
        code, output = run("status", "chat")
        assert (code, "`cleave down chat` stops what runs" in output) == (1, True), output
    assert run("down", "chat", "--timeout", "0.5") == (0, "chat stopped\n")
    assert not any(map(is_alive, pids))
    assert bystander.poll() is None
    left = {each.name for each in folder.path.iterdir() if "damaged" not in each.name}
    assert left == {"lock", "logs"}
    assert run("status") == (0, "no deployments running on this machine\n")


@by_damage
def test_after_a_killed_supervisor_a_damaged_file_is_cleaned_up(job: Job, damage: str) -> None:
    folder = state.get_folder("chat")
    with folder.lock():
        folder.write(state.DeploymentSnapshot("chat", 1, "http://127.0.0.1:1"))
    DAMAGES[damage](folder.state_file)
    assert run("logs", "chat") == (1, "error: chat has no logs on this machine\n")
    code, output = run("status")
    assert code == 0
    if damage == "removed":
        assert run("down", "chat") == (1, "error: chat is not running on this machine\n")
    else:
        assert "chat: its supervisor was killed" in output
        for command in ("status", "top"):
            code, output = run(command, "chat")
            assert (code, "clean up with `cleave down chat`" in output) == (1, True)
        assert run("down", "chat") == (0, "chat stopped\n")
    assert run("status") == (0, "no deployments running on this machine\n")


@pytest.mark.parametrize("damage", ["a folder", "truncated"])
def test_a_deployment_starts_over_damaged_files(job: Job, damage: str) -> None:
    folder = state.get_folder("chat")
    with folder.lock():
        pass
    for name in ("state.json", "agents", TOKEN_FILE, "job.json"):
        DAMAGES[damage](folder.path / name)
    (folder.path / "lock").unlink()
    DAMAGES["a folder"](folder.path / "lock")
    shutil.rmtree(folder.path / "logs")
    (folder.path / "logs").write_text("")
    start(job())
    assert run("down", "chat") == (0, "chat stopped\n")


@pytest.mark.parametrize("damage", ["lock removed", "lock a folder", "all removed"])
def test_a_supervisor_is_found_without_its_lock_file(job: Job, damage: str) -> None:
    folder, pids = start(job())
    if damage == "all removed":
        shutil.rmtree(folder.path)
    else:
        DAMAGES[damage.removeprefix("lock ")](folder.path / "lock")
    code, output = run("status", "chat")
    assert (code, "chat-mixed-0" in output) == (0, True), output
    with pytest.raises(state.StateError, match="already running"):
        up.check_can_start(job())
    with pytest.raises(state.StateError, match="already running"), folder.lock():
        pass
    assert run("down", "chat") == (0, "chat stopped\n")
    assert not any(map(is_alive, pids))


def test_pods_that_a_killed_supervisor_left_are_ended(
    pod: PodBuilder, node: LocalNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up, "_FORCED_STOP_TIMEOUT_S", 5)
    deaf = f"import signal; signal.signal(15, signal.SIG_IGN); {SLEEP}"
    port = find_free_port()
    folder, pids = start(LaunchPlan("chat", "chat", port, port, node, (pod("chat-gateway", deaf),)))
    deadline = time.monotonic() + 20
    while "awake" not in folder.get_log_path("chat-gateway").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(pids[0], signal.SIGKILL)
    DAMAGES["removed"](folder.state_file)
    deadline = time.monotonic() + 20
    while folder.is_running() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert is_alive(pids[1])
    assert run("down", "chat", "--timeout", "0.2") == (0, "chat stopped\n")
    assert not is_alive(pids[1])
