"""The root folder of a small image, put together from this machine's Python."""

import compileall
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "collect_root.py"

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(
        os.geteuid() != 0 or not shutil.which("strip"), reason="needs root and binutils"
    ),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with one package."""
    folder = tmp_path_factory.mktemp("sources") / "environment"
    venv.create(folder, symlinks=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "served").mkdir()
    (packages / "served" / "__init__.py").write_text(
        "import json, ssl, kubernetes.client.models.pod\n"
    )
    models = packages / "kubernetes" / "client" / "models"
    models.mkdir(parents=True)
    for package in (models, models.parent, models.parent.parent):
        (package / "__init__.py").touch()
    for name in ("pod", "node"):
        (models / f"{name}.py").touch()
    compileall.compile_dir(packages / "kubernetes", quiet=1)
    return folder


def collect(environment: Path, root: Path, module: str) -> subprocess.CompletedProcess[str]:
    python = Path(sys.executable).resolve()
    command = [python, SCRIPT, environment, root, module]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_programs_run_in_the_root_that_holds_what_they_load(
    environment: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    done = collect(environment, root, "served")
    assert done.returncode == 0, done.stderr
    inside = f"{environment}/bin/python -c 'import served, json; print(json.__cached__)'"
    said = subprocess.run(
        ["chroot", root, "/bin/sh", "-c", inside], capture_output=True, text=True, check=True
    )
    assert (root / said.stdout.strip().lstrip("/")).exists(), "the standard library is compiled"
    for unused in ("idlelib", "ensurepip"):
        assert not list(root.rglob(unused))
    assert not (root / "usr/bin/apt-get").exists()
    if Path("/var/lib/dpkg/status").exists():
        named = {file.name for file in (root / "var/lib/dpkg/status.d").iterdir()}
        assert {"libc6", "dash", "ca-certificates"} <= named
        assert not {"apt", "dpkg", "gcc"} & named
        documents = Path("/usr/share/doc")
        # Those of packages from one source may be links to one folder.
        folders = [(documents / name).resolve() for name in named]
        own = {folder.name for folder in folders if (folder / "copyright").exists()}
        licensed = {path.parent.name for path in root.glob("usr/share/doc/*/copyright")}
        assert own <= licensed
        assert "ID=debian" in (root / "etc/os-release").read_text()


def test_a_module_that_cannot_be_imported_there_fails_the_build(
    environment: Path, tmp_path: Path
) -> None:
    done = collect(environment, tmp_path / "root", "absent")
    assert done.returncode != 0
    assert "No module named 'absent'" in done.stderr


def test_generated_classes_are_there_if_a_program_loads_them(
    environment: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    done = collect(environment, root, "served")
    assert done.returncode == 0, done.stderr
    (models,) = root.rglob("kubernetes/client/models")
    assert {path.stem for path in models.glob("*.py")} == {"__init__", "pod"}
    compiled = {path.name.split(".")[0] for path in (models / "__pycache__").iterdir()}
    assert compiled == {"__init__", "pod"}
