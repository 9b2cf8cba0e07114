"""The wheel as a user gets it: what it holds, whether its extras resolve, what runs from it.

Environments have the versions of uv.lock and a built wheel, no sources. Resolving asks the index
for these versions as well. What needs the index is skipped where it cannot be reached.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from cleave.distribution import get_version

from tests.support.ports import find_free_port

ROOT = Path(__file__).parents[2]
UV = shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
EMULATED = (ROOT / "examples" / "emulated.yaml").read_text()
WORKLOAD = "  workload: {rate: 2, promptTokens: {mean: 400}, outputTokens: {mean: 90}}\n"

BASE = {
    "demo": ("--engine emulated --once", "gateway,worker"),
    "plan": ("-f planned.yaml", "planner"),
    "simulate": ("-f planned.yaml", "planner"),
    "up": ("-f emulated.yaml", "gateway,worker"),
    "status": ("", ""),
    "top": ("--once", ""),
    "logs": ("absent", ""),
    "down": ("", ""),
    "validate": ("-f emulated.yaml", ""),
    "profile": ("http://127.0.0.1:1", ""),
    "workload": ("trace.csv", "planner"),
    "provision": ("-f planned.yaml --cluster cluster.yaml", "planner"),
    "render": ("-f planned.yaml --cluster cluster.yaml", "planner"),
    "rollout": ("-f emulated.yaml --from emulated.yaml", ""),
    "gateway": ("--agents 127.0.0.1:1", "gateway"),
    "operator": ("", "operator"),
    "batch": ("requests.jsonl --endpoint http://127.0.0.1:1 --timeout 1", ""),
}
"""Commands -> arguments that they accept, and extras that are then missing."""

pytestmark = pytest.mark.timeout(240)


UNREACHABLE = re.compile(r"error sending request|Failed to fetch|operation timed out")
"""What uv writes where there is no index."""


def uv(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [UV, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if done.returncode and UNREACHABLE.search(done.stderr):
        pytest.skip("the package index is not reachable")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "--quiet", "--wheel", "--out-dir", str(folder))
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def install(wheel, tmp_path_factory):
    """Makes an environment of the wheel and extras; returns its `cleave` in a folder."""

    def make(*extras: str):
        environment_folder = tmp_path_factory.mktemp("environment")
        named = [word for extra in extras for word in ("--extra", extra)]
        uv(
            *("sync", "--quiet", "--frozen", "--no-dev", "--no-install-project", *named),
            *("--python", sys.executable),
            UV_PROJECT_ENVIRONMENT=str(environment_folder),
        )
        uv(
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--python",
            str(environment_folder),
            str(wheel),
        )
        return runner(environment_folder, tmp_path_factory.mktemp("folder"))

    return make


def runner(environment: Path, folder: Path):
    (folder / "emulated.yaml").write_text(EMULATED)
    (folder / "planned.yaml").write_text(EMULATED + WORKLOAD)
    shutil.copy(ROOT / "examples" / "cluster.yaml", folder)
    (folder / "trace.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2026-01-01 00:00:{second:02}.0,100,{second}\n" for second in range(60))
    )
    body = {"model": "m", "prompt": "p"}
    request = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    (folder / "requests.jsonl").write_text(json.dumps(request))
    compiled = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    own = {
        # The wheel has the sources of this checkout, whose simulator is compiled.
        "NUMBA_CACHE_DIR": os.environ.get("NUMBA_CACHE_DIR") or compiled,
        "HOME": str(folder),
        "XDG_CACHE_HOME": str(folder / "cache"),
        "CLEAVE_STATE_DIR": str(folder / "state"),
    }

    def run(*arguments: str, program: str = "cleave") -> subprocess.CompletedProcess[str]:
        command = [str(environment / "bin" / program), *arguments]
        return subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **own},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.fixture(scope="module")
def base(install):
    return install()


@pytest.fixture(scope="module")
def local(install):
    return install("gateway", "worker", "planner")


def test_the_wheel_holds_every_file_of_both_packages_and_nothing_else(wheel) -> None:
    packages = ("operator/cleave", "worker/cleave_worker")
    listed = ["git", "ls-files", *packages]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    names = {name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name}
    assert names == {path.partition("/")[2] for path in files.stdout.split()}
    metadata = {name.rpartition("/")[2] for name in zipfile.ZipFile(wheel).namelist()}
    assert {"LICENSE", "NOTICE", "THIRD_PARTY.md"} <= metadata
    assert {"cleave/py.typed", "cleave_worker/py.typed", "cleave/report/page.css"} <= names


def test_the_distribution_requires_only_what_an_index_can_have() -> None:
    built = importlib.metadata.metadata("cleave-serving")
    extras = built.get_all("Provides-Extra")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*extras} == {*project["optional-dependencies"]}
    requirements = built.get_all("Requires-Dist")
    assert {extra for each in requirements for extra in re.findall("extra == '(.+?)'", each)} == {
        *extras
    }
    for requirement in requirements:
        specifier = requirement.partition(";")[0]
        assert not re.search(r"[+@]", specifier), "no local version, no address"
        assert not specifier.startswith("cleave"), "extras within extras are resolved"


def test_every_extra_resolves_from_the_index_by_the_wheel_alone(wheel, tmp_path) -> None:
    locked, requirements = tmp_path / "locked.txt", tmp_path / "wanted.in"
    uv(
        *("export", "--quiet", "--frozen", "--all-extras", "--no-dev", "--no-emit-project"),
        *("--no-hashes", "--output-file", str(locked)),
    )
    extras = ",".join(importlib.metadata.metadata("cleave-serving").get_all("Provides-Extra"))
    requirements.write_text(f"cleave-serving[{extras}] @ {wheel.as_uri()}\n")
    # Without the repository's settings, whose overrides no wheel carries.
    found = uv(
        *("pip", "compile", "--quiet", "--no-config", "--no-annotate"),
        *("--constraints", str(locked), str(requirements)),
    )
    assert re.search(r"^vllm==", found, re.MULTILINE)


def test_the_base_wheel_shows_its_version_and_every_command(base) -> None:
    assert base("--version").stdout == f"cleave {get_version()}\n"
    commands = re.findall(r"^│ (\w+) ", base("--help").stdout, re.M)
    assert {*commands} == {*BASE}


@pytest.mark.parametrize("command", BASE)
def test_a_command_that_lacks_an_extra_ends_with_how_to_install_it(base, command) -> None:
    arguments, extras = BASE[command]
    done = base(command, *arguments.split())
    assert "internal error" not in done.stderr
    assert "Traceback" not in done.stderr
    if extras:
        names = " and ".join(f'"{extra}"' for extra in extras.split(","))
        noun = "extras" if "," in extras else "extra"
        remedy = f"pip install 'cleave-serving[{extras}]'"
        assert done.stderr == f"error: 'cleave {command}' needs the {noun} {names}: {remedy}\n"
        assert done.returncode == 1
    else:
        assert "extra" not in done.stderr
        assert done.returncode != 2, done.stderr


def test_a_worker_without_its_extra_ends_with_how_to_install_it(base) -> None:
    arguments = "--engine emulated --model m --role mixed --deployment d --name d-0 --host ::1"
    done = base(*arguments.split(), program="cleave-worker")
    assert "Traceback" not in done.stderr
    assert "pip install 'cleave-serving[worker]'" in done.stderr


def test_a_local_deployment_runs_from_the_wheel(local) -> None:
    assert local("validate", "-f", "planned.yaml").returncode == 0
    port = str(find_free_port())
    up = local("up", "-f", "emulated.yaml", "--detach", "--port", port)
    try:
        assert up.returncode == 0, up.stderr
        assert "ready" in local("status").stdout
    finally:
        assert local("down").returncode == 0
    demo = local("demo", "--engine", "emulated", "--once", "--port", port)
    assert demo.returncode == 0, demo.stderr
    assert "KV handoffs used" in demo.stdout


def test_vllm_that_is_not_installed_is_one_line_with_the_commands(local) -> None:
    (line,) = local("demo", "--once").stderr.splitlines()
    assert line.startswith("error: vLLM is not installed; on CPU: pip install nixl==")
