"""The commands on a real deployment with emulated engines."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from cleave.local import state
from cleave.local.files import TOKEN_FILE

pytestmark = pytest.mark.timeout(600)

Cleave = Callable[..., "subprocess.CompletedProcess[str]"]

EMULATOR = "cleave_worker.emulator.main"
"""Fourth word of an engine's command line; its warden has it further back."""


@pytest.fixture
def cleave(state_root: Path) -> Cleave:
    def run(*args: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "cleave.cli.main", *args],
            capture_output=True, text=True, timeout=240, check=False,
            env=os.environ | {"CLEAVE_STATE_DIR": str(state_root)},
        )  # fmt: skip

    return run


def wait_until_served(url: str, body: dict[str, object]) -> None:
    deadline = time.monotonic() + 180
    while True:
        with suppress(httpx.TransportError):
            if httpx.post(url, json=body, timeout=30).status_code == 200:
                return
        assert time.monotonic() < deadline, "nothing is served"
        time.sleep(0.2)


def test_up_status_chat_logs_down(
    cleave: Cleave, manifest: Path, port: str, state_root: Path
) -> None:
    up = cleave("up", "-f", str(manifest), "--port", port, "-d", "--timeout", "180")
    try:
        assert up.returncode == 0, up.stderr
        assert "ready  facebook/opt-13b at " in up.stdout

        (found,) = json.loads(cleave("status", "-o", "json").stdout)
        assert found["deployment"] == "chat"
        assert (found["plan"]["gpus"], found["plan"].get("predicted")) == (2, None)
        shown = {(i["instance"], i["role"], i["state"]) for i in found["instances"]}
        assert shown == {
            ("chat-prefill-0", "prefill", "ready"),
            ("chat-decode-0", "decode", "ready"),
            ("chat-gateway", "gateway", "ready"),
        }
        table = cleave("status", "chat").stdout
        assert table.split()[:4] == ["INSTANCE", "ROLE", "STATE", "ENGINE"]

        body = {"model": "facebook/opt-13b", "prompt": "hello", "max_tokens": 4}
        url = f"http://127.0.0.1:{port}/v1/completions"
        assert httpx.post(url, json=body, timeout=30).status_code == 200

        # A gateway that starts with another token than the agents' is given theirs.
        token = state_root / "chat" / TOKEN_FILE
        token.write_text("of another program")
        os.kill(next(i["pid"] for i in found["instances"] if i["role"] == "gateway"), 9)
        wait_until_served(url, body)
        assert f"{token} was changed or removed" in cleave("logs", "chat", "supervisor").stdout

        # Only who has the engine's key learns what it serves.
        engine = next(i["url"] for i in found["instances"] if i["role"] == "decode")
        measured = cleave("profile", engine, "--model", "other")
        expected = "serves facebook/opt-13b: there is no 'other'"
        assert (measured.returncode, expected in measured.stderr) == (1, True), measured.stderr

        again = cleave("up", "-f", str(manifest), "--port", port)
        assert (again.returncode, again.stderr.startswith("error: chat is already running")) == (
            1,
            True,
        )
    finally:
        down = cleave("down", "chat")
    assert (down.returncode, down.stdout) == (0, "chat stopped\n")
    assert cleave("status").stdout == "no deployments running on this machine\n"
    assert cleave("logs", "chat", "chat-gateway").stdout
    with pytest.raises(httpx.ConnectError):
        httpx.post(url, json=body, timeout=5)


def test_ctrl_c_ends_what_runs_in_the_foreground(
    manifest: Path, port: str, state_root: Path
) -> None:
    command = [sys.executable, "-m", "cleave.cli.main", "up", "-f", str(manifest), "--port", port]
    env = os.environ | {"CLEAVE_STATE_DIR": str(state_root)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as up:
        try:
            assert up.stdout is not None
            assert any(line.startswith("ready ") for line in up.stdout)
            os.kill(up.pid, signal.SIGINT)
            assert up.wait(60) == 0
        finally:
            up.kill()
    assert state.list_running() == []


def test_up_reports_a_failed_engine_at_once_and_status_keeps_it(
    cleave: Cleave, manifest: Path, port: str, state_root: Path
) -> None:
    command = [sys.executable, "-m", "cleave.cli.main", "up", "-f", str(manifest), "--port", port]
    env = os.environ | {"CLEAVE_STATE_DIR": str(state_root)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as up:
        try:
            assert up.stdout is not None
            assert any(line.startswith("ready ") for line in up.stdout)
            snapshot = state.find_running("chat").read()
            assert snapshot is not None
            (agent,) = (pod.pid for pod in snapshot.pods if pod.name == "chat-prefill-0")
            children = psutil.Process(agent or 0).children(recursive=True)
            (engine,) = (each for each in children if each.cmdline()[3:4] == [EMULATOR])
            engine.kill()
            failure = "engine ended with status 137"
            assert any(line.startswith(f"chat-prefill-0: {failure}") for line in up.stdout)
            (found,) = json.loads(cleave("status", "-o", "json").stdout)
            failures = {row["instance"]: row["lastFailure"] for row in found["instances"]}
            assert failures.pop("chat-prefill-0").startswith(failure)
            assert set(failures.values()) == {""}
            assert f"chat-prefill-0: last failure: {failure}" in cleave("status").stdout
            up.send_signal(signal.SIGINT)
            assert up.wait(60) == 0
        finally:
            up.kill()


def test_engines_that_never_start_end_the_wait_with_their_last_words(
    cleave: Cleave, manifest: Path, port: str, tmp_path: Path
) -> None:
    content = yaml.safe_load(manifest.read_text())
    content["spec"]["engine"]["args"] = ["--block-size=0"]
    broken = tmp_path / "broken.yaml"
    broken.write_text(yaml.safe_dump(content))
    up = cleave("up", "-f", str(broken), "--port", port, "-d")
    failure = "engine ended with status 2: "
    assert up.returncode == 1
    assert f"chat-prefill-0: {failure}" in up.stdout
    assert f"has lost its engine 3 times: {failure}" in up.stderr
    assert "--block-size must be at least 1" in up.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_detached_start_that_is_broken_off_leaves_nothing(
    manifest: Path, port: str, state_root: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "cleave.cli.main", "up", "-f", str(manifest), "--port", port]
    env = os.environ | {"CLEAVE_STATE_DIR": str(state_root)}
    with subprocess.Popen([*command, "-d"], stdout=subprocess.PIPE, text=True, env=env) as up:
        try:
            assert up.stdout is not None
            assert any("starting" in line or "loading" in line for line in up.stdout)
            up.send_signal(number)
            assert up.wait(60) == 130
        finally:
            up.kill()
    assert state.list_running() == []


def test_a_killed_supervisor_takes_its_processes_with_it(
    cleave: Cleave, manifest: Path, port: str, state_root: Path
) -> None:
    assert cleave("up", "-f", str(manifest), "--port", port, "-d").returncode == 0
    snapshot = state.find_running("chat").read()
    assert snapshot is not None
    pods = [psutil.Process(pod.pid or 0) for pod in snapshot.pods]
    tree = pods + [child for pod in pods for child in pod.children(recursive=True)]
    os.kill(snapshot.supervisor_pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(tree, timeout=45)
    assert alive == []


def test_the_demo_answers_once_and_ends(cleave: Cleave, port: str) -> None:
    done = cleave(
        "demo", "--engine", "emulated", "--once", "--port", port, "--prompt", "What's up?"
    )
    assert done.returncode == 0, done.stderr
    assert "emulated engine" in done.stdout
    assert "KV handoffs used                1" in done.stdout
    assert cleave("status").stdout == "no deployments running on this machine\n"
