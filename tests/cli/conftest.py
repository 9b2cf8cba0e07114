"""A command line that runs in this process, with a state folder of its own."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.ports import find_free_port

SMALLEST = """\
apiVersion: cleave.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: facebook/opt-13b
  slo: {ttftMs: 400, tpotMs: 40}
  engine: {type: Emulated, emulated: {timeScale: 0.01}}
"""


@pytest.fixture(autouse=True)
def state_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLEAVE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "state"


@pytest.fixture
def cli() -> CliRunner:
    return CliRunner()


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "chat.yaml"
    path.write_text(SMALLEST)
    return path


@pytest.fixture
def port() -> str:
    return str(find_free_port())
