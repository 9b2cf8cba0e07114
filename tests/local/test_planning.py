"""What must be installed before anything is started."""

import sys
import tomllib
from pathlib import Path

import pytest

from cleave.api.engine import EngineType
from cleave.distribution import MissingExtraError
from cleave.local import planning
from cleave.local.errors import DeploymentStartError

ROOT = Path(__file__).parents[2]


def test_vllm_without_its_system_library_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planning, "_NUMA_LIBRARY", "libabsent.so.1")
    with pytest.raises(DeploymentStartError) as refused:
        planning.require_engine(EngineType.VLLM)
    assert "vLLM needs libabsent.so.1: apt-get install libnuma1" in str(refused.value)


def test_the_emulated_engine_needs_no_system_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_NUMA_LIBRARY", "libabsent.so.1")
    planning.require_engine(EngineType.EMULATED)


@pytest.mark.parametrize(
    ("is_checkout", "commands"),
    [
        (True, ["on CPU: make setup;", "on GPUs: uv sync --frozen --extra worker-cuda;"]),
        (
            False,
            ["on CPU: pip install nixl==", "on GPUs: pip install 'cleave-serving[worker-cuda]'"],
        ),
    ],
)
def test_vllm_that_is_absent_is_refused_with_the_commands_that_install_it(
    monkeypatch: pytest.MonkeyPatch, is_checkout: bool, commands: list[str]
) -> None:
    monkeypatch.setattr(planning, "find_spec", lambda _: None)
    folder = Path(sys.prefix).parent if is_checkout else None
    monkeypatch.setattr(planning.distribution, "_find_editable_sources", lambda: folder)
    monkeypatch.setattr(sys, "prefix", f"{folder}/.venv")
    with pytest.raises(DeploymentStartError, match=r"^vLLM is not installed; on CPU") as refused:
        planning.require_engine(EngineType.VLLM)
    assert all(command in str(refused.value) for command in commands)


def test_the_versions_to_install_are_those_that_the_project_runs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    ours = {each for each in project["dependency-groups"]["worker-cpu"] if "==" in each}
    assert ours == {each for each in planning._VLLM_CPU_INSTALL.split() if "==" in each}


def test_extras_that_pods_run_with_are_required_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning.distribution, "find_missing_extras", list)
    with pytest.raises(MissingExtraError) as refused:
        planning.require_engine(EngineType.EMULATED)
    assert refused.value.extras == ["gateway", "worker"]
