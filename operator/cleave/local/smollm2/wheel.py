"""Downloads one wheel, and goes on where an earlier download ended, be it of another process.

Where the wheel lies is a question for uv or pip, which know the user's package index, proxy and
keys; neither continues a download that a process has left behind.
"""

import hashlib
import http.client
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cleave.local.errors import DeploymentStartError

Tick = Callable[[int, int, str], None]
"""Called with bytes done, bytes in total, and a text."""

_INDEX_TIMEOUT_S = 90.0
_READ_TIMEOUT_S = 30.0
_ATTEMPTS = 5
_PAUSE_S = 1.0
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Wheel:
    """One file of the package index."""

    requirement: str
    """name==version"""
    file_name: str
    size: int
    """Bytes."""
    sha256: str

    def __str__(self) -> str:
        return f"{self.requirement.replace('==', ' ')}, {self.size / 1e6:.0f} MB"


def fetch_wheel(wheel: Wheel, path: Path, tick: Tick) -> None:
    """Complete the file at `path`, or make it; nothing is loaded when it is whole. Raises
    DeploymentStartError when that fails; what has arrived stays, unless its digest is wrong."""
    if _get_size(path) != wheel.size and (fault := _complete(wheel, path, tick)):
        raise DeploymentStartError([f"{wheel} cannot be downloaded: {fault}"])
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        path.unlink()
        raise DeploymentStartError([f"{path} has the digest {found}, not {wheel.sha256}; removed"])


def _complete(wheel: Wheel, path: Path, tick: Tick) -> str:
    """Load what the file lacks; returns why that fails, empty: it does not."""
    fault = "it breaks off"
    try:
        # uv and pip try several times themselves.
        address = find_address(wheel)
    except OSError as error:
        return str(error)
    for attempt in range(_ATTEMPTS):
        time.sleep(attempt and _PAUSE_S)
        try:
            _load_rest(path, address, wheel, tick)
        except urllib.error.HTTPError as error:
            fault = f"{address}: status {error.code}"
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                path.unlink()
        except (OSError, http.client.HTTPException) as error:
            fault = str(getattr(error, "reason", "") or error) or type(error).__name__
        if _get_size(path) == wheel.size:
            return ""
    return fault


def find_address(wheel: Wheel) -> str:
    """Ask uv, then pip, where the wheel lies. Raises OSError when neither finds it."""
    question = ["--quiet", "--no-deps", "--only-binary", ":all:"]
    commands = [[sys.executable, "-m", "pip", "install", *question, "--dry-run"]]
    commands[0] += ["--ignore-installed", "--report", "-", wheel.requirement]
    if uv := shutil.which("uv"):
        options = ["--no-header", "--format", "pylock.toml", "--python", sys.executable, "-"]
        commands.insert(0, [uv, "pip", "compile", *question, *options])
    faults = []
    for command in commands:
        try:
            done = subprocess.run(
                command,
                input=wheel.requirement,
                capture_output=True,
                text=True,
                timeout=_INDEX_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            faults.append(f"no answer within {_INDEX_TIMEOUT_S:.0f} s")
            continue
        if found := re.search(rf'\w+://[^"\s]+/{re.escape(wheel.file_name)}', done.stdout):
            return found[0]
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        faults += [line.removeprefix("cause: ")[:300] for line in lines[-1:]]
    raise OSError(faults[0] if faults else "neither uv nor pip names its address")


def _load_rest(path: Path, address: str, wheel: Wheel, tick: Tick) -> None:
    """Request the rest of the file. Raises OSError or HTTPException."""
    begin = min(_get_size(path), wheel.size)
    request = urllib.request.Request(address, headers={"Range": f"bytes={begin}-"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=_READ_TIMEOUT_S) as response:  # noqa: S310
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            begin = 0
        with path.open("r+b" if begin else "wb") as file:
            file.seek(begin)
            while chunk := response.read(min(_CHUNK_BYTES, wheel.size - file.tell())):
                file.write(chunk)
                tick(file.tell(), wheel.size, f"downloading {wheel}")


def _get_size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
