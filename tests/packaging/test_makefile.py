"""What the Makefile would run, in a folder without an environment and in one with vLLM."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "Makefile", tmp_path)
    return tmp_path


def steps(folder: Path, *words: str) -> str:
    command = ["make", "--dry-run", *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("arguments", ["--engine  emulated --once", "--once --engine=emulated"])
def test_the_emulated_engine_runs_without_vllm_being_installed(clone, arguments) -> None:
    run = steps(clone, "run", f"ARGS={arguments}")
    assert "worker-cpu" not in run
    assert "--no-default-groups --extra gateway --extra worker" in run
    assert run.endswith(f".venv/bin/cleave demo {arguments}\n")


@pytest.mark.parametrize("arguments", ["", "--prompt 'is it emulated'", "--model emulated"])
def test_everything_else_installs_vllm(clone, arguments) -> None:
    assert "--group worker-cpu" in steps(clone, "run", f"ARGS={arguments}")
    assert "--group worker-cpu" in steps(clone, "setup")


def test_an_environment_that_has_vllm_keeps_it(clone) -> None:
    (clone / ".venv/lib/python3.11/site-packages/vllm").mkdir(parents=True)
    assert "--group worker-cpu" in steps(clone, "run", "ARGS=--engine emulated")


def test_the_linters_run_beside_the_tests() -> None:
    text = (ROOT / "Makefile").read_text()
    assert re.findall(r"-j3 \$\(GROUPS\) (.*)\)$", text, re.MULTILINE) == ["static-checks"]
    (recipe,) = re.findall(r"^static-checks:.*\n\t(.*)$", text, re.MULTILINE)
    assert re.findall(r"\) --no-print-directory (\w+)", recipe) == ["lint", "site"]


@pytest.mark.parametrize(("status", "first", "again"), [(0, 0, 0), (1, 0, 2), (2, 2, 2), (3, 2, 2)])
def test_what_fails_beside_other_groups_is_judged_when_it_runs_again(
    clone, status: int, first: int, again: int
) -> None:
    """`status`: pytest's, 1 if tests have failed; `first`, `again`: make's."""
    fake = clone / ".venv/bin/pytest"
    fake.parent.mkdir(parents=True)
    fake.write_text(f"#!/bin/sh\necho $@ >> seen\nexit {status}\n")
    fake.chmod(0o755)
    (clone / "build").mkdir()
    for group in ("fast-tests", "engine-tests"):
        for words, expected in ([], first), (["AGAIN=1"], again):
            done = subprocess.run(["make", group, *words], cwd=clone, capture_output=True)
            assert done.returncode == expected
        assert (clone / f"build/{group}.failed").exists() == (status == 1)
    lines = (clone / "seen").read_text().splitlines()
    assert ["--last-failed" in line for line in lines] == [False, True] * 2


def test_help_has_every_rule_that_says_what_it_does(clone) -> None:
    done = subprocess.run(["make", "help"], cwd=clone, capture_output=True, text=True, check=True)
    listed = [line.split()[0] for line in done.stdout.splitlines()]
    documented = re.findall(r"^([\w-]+):.* ## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert listed == documented
    assert {"run", "test", "e2e", "setup"} <= {*listed}
