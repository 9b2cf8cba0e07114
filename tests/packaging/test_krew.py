"""The archive and the manifest for krew."""

import hashlib
import os
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
URL = "https://example.org/v0.1.0/kubectl-cleave.tar.gz"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    wheel = tmp_path / "cleave_serving-0.1.0-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    return wheel


def package(wheel: Path, out: Path) -> dict:
    subprocess.run([ROOT / "scripts" / "krew", wheel, URL, out], check=True)
    return yaml.safe_load((out / "krew-cleave.yaml").read_text())


def test_the_manifest_names_an_archive_that_can_be_built_again(wheel: Path, tmp_path: Path) -> None:
    plugin, again = package(wheel, tmp_path / "a"), package(wheel, tmp_path / "b")
    assert plugin == again
    assert (plugin["kind"], plugin["metadata"]) == ("Plugin", {"name": "cleave"})
    assert plugin["spec"]["version"] == "v0.1.0"
    assert len(plugin["spec"]["shortDescription"]) <= 80
    (platform,) = plugin["spec"]["platforms"]
    archive = (tmp_path / "a" / "kubectl-cleave.tar.gz").read_bytes()
    assert (platform["uri"], platform["sha256"]) == (URL, hashlib.sha256(archive).hexdigest())
    with tarfile.open(tmp_path / "a" / "kubectl-cleave.tar.gz") as opened:
        names = {name.removeprefix("./") for name in opened.getnames()}
    assert names >= {platform["bin"], "LICENSE", wheel.name}


def test_the_program_runs_the_wheel_beside_it(wheel: Path, tmp_path: Path) -> None:
    package(wheel, tmp_path / "out")
    store, programs = tmp_path / "store", tmp_path / "bin"
    programs.mkdir()
    with tarfile.open(tmp_path / "out" / "kubectl-cleave.tar.gz") as opened:
        opened.extractall(store, filter="data")
    # As krew does.
    (programs / "kubectl-cleave").symlink_to(store / "kubectl-cleave")
    uv = programs / "uv"
    uv.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    uv.chmod(uv.stat().st_mode | stat.S_IXUSR)
    for tool in ("dirname", "readlink"):
        (programs / tool).symlink_to(str(shutil.which(tool)))
    environment = os.environ | {"PATH": str(programs)}
    run = [programs / "kubectl-cleave", "plan", "-f", "a b.yaml"]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=True)
    words = done.stdout.splitlines()
    assert words[words.index("--from") + 1].endswith(f" @ file://{store}/{wheel.name}")
    assert words[-4:] == ["kubectl-cleave", "plan", "-f", "a b.yaml"]
    uv.unlink()
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "needs uv" in done.stderr
