"""The installed distribution as Cleave reads it: its extras and the command that adds one."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from cleave import distribution

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EDITABLE = '{"url": "file:///a%20b", "dir_info": {"editable": true}}'


def test_the_distribution_is_the_projects_and_its_version_too() -> None:
    assert PROJECT["name"] == distribution.NAME
    assert distribution.get_version() == PROJECT["version"]


def test_an_extra_is_missing_while_one_requirement_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert distribution.find_missing_extras(["gateway", "planner"]) == []
    extras = {"whole": ["numpy"], "part": ["numpy", "no-such-thing"]}
    monkeypatch.setattr(distribution, "_read_extras", lambda: extras)
    assert distribution.find_missing_extras(extras) == ["part"]
    distribution.require("whole")
    with pytest.raises(
        distribution.MissingExtraError, match=r'^needs the extra "part": make setup$'
    ):
        distribution.require("whole", "part")


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("numba", "planner"),
        ("uvloop", "gateway"),
        ("kubernetes.aio", "operator"),
        ("opentelemetry.sdk.trace", "otel"),
        ("aiohttp", "worker"),
        ("vllm", "worker-cuda"),
    ],
)
def test_a_module_is_found_in_the_smallest_extra_that_brings_it(module: str, extra: str) -> None:
    assert distribution.find_extras_with(module)[0] == extra


@pytest.mark.parametrize("module", ["cleave.absent", "typing", "", "num"])
def test_a_module_of_no_extra_is_found_in_none(module: str) -> None:
    assert distribution.find_extras_with(module) == []


@pytest.mark.parametrize(
    ("origin", "prefix", "command"),
    [
        (EDITABLE, "/a b/.venv", "make setup"),
        (EDITABLE, "/other", "pip install -e '/a b[gateway,worker]'"),
        ("{}", "/a b/.venv", "pip install 'cleave-serving[gateway,worker]'"),
        (None, "/other", "pip install 'cleave-serving[gateway,worker]'"),
    ],
)
def test_the_command_is_one_that_this_environment_has(
    monkeypatch: pytest.MonkeyPatch, origin: str | None, prefix: str, command: str
) -> None:
    installed = SimpleNamespace(read_text=lambda _: origin)
    monkeypatch.setattr(distribution, "distribution", lambda _: installed)
    monkeypatch.setattr(sys, "prefix", prefix)
    assert distribution.build_install_command(["gateway", "worker"]) == command


def test_every_page_and_source_names_this_distribution_and_its_extras() -> None:
    listed = ["git", "ls-files", "*.md", "*.py", "*.toml", "images", "Makefile", "scripts"]
    files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    extras = PROJECT["optional-dependencies"]
    named = {
        (path, *match.groups())
        for path in files.stdout.split()
        for match in re.finditer(r"\b(cleave[\w-]*)\[([a-z,-]+)\]", (ROOT / path).read_text())
    }
    assert len(named) > 3
    strange = [
        each
        for each in named
        if each[1] != PROJECT["name"] or not {*each[2].split(",")} <= {*extras}
    ]
    assert strange == []
