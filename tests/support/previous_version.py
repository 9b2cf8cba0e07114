"""The version before this one (N-1), taken from the repository's history for tests of version skew.

Processes run it with this environment's libraries: its packages come first on PYTHONPATH. There is
no release yet, so COMMIT stands for one; docs/decisions/releases.md says when it changes.
"""

import os
import re
import subprocess
import tarfile
import tomllib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
COMMIT = "5c8f5624f611e0cec11e67e0b3dc6dfbf17ddcfb"
"""The first one whose gateways sign calls as its agents ask for."""
VERSION = "0.1.0.dev0"
"""What it calls itself in tests, as it shares its number with the present version."""

_PARTS = ("operator", "worker", "charts", "crds", "pyproject.toml")
_CHOICE = """
import os, re, sys

pod = os.environ.get("CLEAVE_POD_NAME", "")
if re.search({pattern!r}, pod):
    sys.path.insert(1, {sources!r})
    with open({chosen!r}, "a") as file:
        file.write(pod + "\\n")
"""


@dataclass(frozen=True)
class PreviousVersion:
    """Its files, in a folder of the test's own."""

    sources: Path
    """For PYTHONPATH: both packages, and the metadata of the distribution."""
    chart: Path
    crds: Path

    def choose_for(self, pattern: str, folder: Path) -> Path:
        """Make a folder that, on PYTHONPATH, gives pods whose name matches `pattern` this version
        and all others the present one. Its file `chosen` names the pods that got this one."""
        folder.mkdir()
        choice = _CHOICE.format(
            sources=str(self.sources), pattern=pattern, chosen=str(folder / "chosen")
        )
        (folder / "sitecustomize.py").write_text(choice)
        return folder


def extract(folder: Path) -> PreviousVersion:
    """Extract it into `folder`. Skips the test where the history does not reach back to it."""
    archive = subprocess.run(
        ["git", "-C", REPOSITORY, "archive", COMMIT, *_PARTS],
        capture_output=True,
        env=os.environ | {"GIT_NO_LAZY_FETCH": "1"},
        check=False,
    )
    if archive.returncode:
        pytest.skip(f"no commit {COMMIT[:8]} here (a shallow clone?): git fetch --unshallow")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    sources = folder / "sources"
    sources.mkdir()
    (folder / "operator" / "cleave").rename(sources / "cleave")
    (folder / "worker" / "cleave_worker").rename(sources / "cleave_worker")
    _write_metadata(tomllib.loads((folder / "pyproject.toml").read_text())["project"], sources)
    chart = folder / "charts" / "cleave"
    description = chart / "Chart.yaml"
    text = re.sub(r"(?m)^version:.*$", "version: 0.1.0-dev.0", description.read_text())
    description.write_text(re.sub(r"(?m)^appVersion:.*$", f"appVersion: {VERSION}", text))
    for crd in (chart / "files" / "crds").iterdir():
        crd.write_text(re.sub(r"(?m)(cleave.dev/release:).*$", r'\1 "0"', crd.read_text()))
    return PreviousVersion(sources, chart, folder / "crds")


def _write_metadata(project: dict, sources: Path) -> None:
    """What `importlib.metadata` reads: version, requirements and entry points."""
    folder = sources / f"{project['name'].replace('-', '_')}-{VERSION}.dist-info"
    folder.mkdir()
    extras = project["optional-dependencies"]
    requirements = [f"Requires-Dist: {each}" for each in project["dependencies"]]
    for extra, names in extras.items():
        requirements += [f'Requires-Dist: {name} ; extra == "{extra}"' for name in names]
    head = ["Metadata-Version: 2.4", f"Name: {project['name']}", f"Version: {VERSION}"]
    (folder / "METADATA").write_text("\n".join([*head, *requirements]) + "\n")
    groups = project["entry-points"] | {"console_scripts": project["scripts"]}
    lines = []
    for group, entries in groups.items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
