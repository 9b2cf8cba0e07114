"""What the images hold, without a builder: environments made as images/Dockerfile makes them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = ("pyproject.toml", "uv.lock", "README.md", "LICENSE", "operator", "worker")
PROGRAMS = {
    "operator": [
        "cleave.controller.main",
        "cleave.controller.replan.planner_process",
        "cleave.planner.plan_search",
    ],
    "gateway": ["cleave.gateway.main", "cleave.rpc.endpointslices"],
    "worker": [
        "cleave_worker.agent.main",
        "cleave_worker.emulator.main",
        "cleave.rpc.endpointslices",
    ],
}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What .dockerignore lets through to the builder."""
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.parametrize("extra", PROGRAMS)
def test_an_image_holds_all_that_its_programs_import(
    sources: Path, tmp_path: Path, extra: str
) -> None:
    uv = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
    environment_folder = tmp_path / "environment"
    run(
        *(uv, "sync", "--quiet", "--frozen", "--no-dev", "--no-editable"),
        *("--extra", extra, "--python", sys.executable),
        cwd=sources,
        env=os.environ | {"UV_PROJECT_ENVIRONMENT": str(environment_folder)},
    )
    for program in PROGRAMS[extra]:
        run(
            str(environment_folder / "bin" / "python"),
            "-I",
            "-c",
            f"import {program}",
            cwd=tmp_path,
        )


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
