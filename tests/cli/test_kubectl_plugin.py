"""`kubectl cleave` with a kubectl that answers from a script."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from cleave.cli.kubectl_plugin import app

from tests.cli.conftest import SMALLEST

PLACED = f"{SMALLEST}  placement: {{manual: [{{role: mixed, replicas: 1}}]}}\n"


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Makes a kubectl of a shell script, which also writes down its arguments."""

    def make(script: str) -> Path:
        words, program = tmp_path / "words", tmp_path / "bin" / "kubectl"
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/bin/sh\necho "$*" >{words}\n{script}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        return words

    return make


def test_a_rollout_is_compared_with_what_runs(cli: CliRunner, kubectl, tmp_path: Path) -> None:
    old, new = tmp_path / "old.yaml", tmp_path / "new.yaml"
    old.write_text(PLACED)
    new.write_text(PLACED.replace("name: chat", "name: chat, namespace: ai").replace("13b", "30b"))
    words = kubectl(f"cat {old}")
    done = cli.invoke(app, ["rollout", "-f", str(new), "--context", "here", "-o", "json"])
    assert done.exit_code == 0, done.stderr
    assert len(json.loads(done.stdout)["steps"]) == 3
    said = "--context here --namespace ai get llmdeployments.cleave.dev chat --output yaml\n"
    assert words.read_text() == said
    cli.invoke(app, ["rollout", "-f", "-", "-n", "x"], input=new.read_text())
    assert words.read_text().startswith("--namespace x get")


def test_what_kubectl_says_is_the_error(cli: CliRunner, kubectl, manifest: Path) -> None:
    kubectl("echo 'Error from server (NotFound): chat not found' >&2; exit 1")
    done = cli.invoke(app, ["rollout", "-f", str(manifest)])
    assert done.exit_code == 1
    assert done.stderr == "error: kubectl: Error from server (NotFound): chat not found\n"
    kubectl("echo 'error: deployments.apps not found' >&2; exit 1")
    done = cli.invoke(app, ["top", "chat"])
    assert done.exit_code == 1
    assert done.stderr == "error: kubectl: deployments.apps not found\n"


def test_without_kubectl_there_is_one_line(
    cli: CliRunner, manifest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    done = cli.invoke(app, ["top", "chat"])
    assert (done.exit_code, done.stderr) == (1, "error: kubectl is not on PATH\n")


def test_top_reads_the_gateway_through_a_forwarded_port(cli: CliRunner, kubectl, port: str) -> None:
    # `exec`: the process that is killed at the end is the one that runs.
    words = kubectl(f"echo 'Forwarding from 127.0.0.1:{port} -> 8081'; exec sleep 60")
    done = cli.invoke(app, ["top", "chat", "-n", "ai", "--once"])
    assert words.read_text() == "--namespace ai port-forward deployment/chat-gateway :8081\n"
    assert done.exit_code == 1, "nothing listens there"
    assert f"error: gateway at http://127.0.0.1:{port}: " in done.stderr


def test_the_program_is_installed_where_kubectl_looks_for_it() -> None:
    program = Path(sys.executable).parent / "kubectl-cleave"
    done = subprocess.run([program, "--help"], capture_output=True, text=True, check=True)
    assert "Usage: kubectl cleave " in done.stdout
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert {"plan", "validate", "rollout", "top"} <= commands.keys()
    assert not {"up", "down", "demo"} & commands.keys()
