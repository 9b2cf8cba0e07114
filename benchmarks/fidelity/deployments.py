"""Fleets brought up through the command line, as a user does, and always taken down."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cores import find_listener

from cleave.profiling.client import OpenAIClient
from cleave.rpc.engine_key import ENV, build_headers

UP_TIMEOUT_S = 600


class StageError(RuntimeError):
    """A fleet did not come up; what the command line said."""


@dataclass(frozen=True, slots=True)
class Case:
    """How many instances of each role."""

    prefill: int = 0
    decode: int = 0
    mixed: int = 0

    @property
    def name(self) -> str:
        return f"{self.mixed}M" if self.mixed else f"{self.prefill}P{self.decode}D"

    @property
    def ways(self) -> int:
        """From client to instances and back that a request takes."""
        return 1 if self.mixed else 2

    @property
    def pools(self) -> list[dict[str, object]]:
        counts = {"prefill": self.prefill, "decode": self.decode, "mixed": self.mixed}
        return [{"role": role, "replicas": n} for role, n in counts.items() if n]


@dataclass(frozen=True, slots=True)
class Stage:
    """A fleet that is ready."""

    url: str
    engines: dict[str, list[str]]
    """Role -> URLs of its engines."""

    def connect(self, engine: str, model: str = "") -> OpenAIClient:
        """A client of an engine, with the key that it has in its environment."""
        key = find_listener(engine).environ().get(ENV, "")
        return OpenAIClient(engine, model, headers=build_headers(key))


@contextmanager
def deployed(spec: dict[str, Any], case: Case, folder: Path) -> Iterator[Stage]:
    """Bring `case` up with `spec` (of an LLMDeployment, without placement) and take it down."""
    # A stage before this one may have left this process, and what it starts, a single core.
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    folder.mkdir(parents=True, exist_ok=True)
    name = f"fidelity-{case.name.lower()}"
    manifest = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        # Roles stay as the case says, but where the subject flips them.
        "spec": {"pools": {"flipping": "Off"}} | spec | {"placement": {"manual": case.pools}},
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(manifest))
    port = _free_port()
    up = ("up", "-f", str(file), "--port", str(port), "--detach", "--timeout", str(UP_TIMEOUT_S))
    try:
        _cleave(folder, *up, timeout_s=UP_TIMEOUT_S + 60)
        (found,) = json.loads(_cleave(folder, "status", name, "-o", "json"))
        engines: dict[str, list[str]] = {}
        for instance in found["instances"]:
            if instance["role"] != "gateway":
                engines.setdefault(instance["role"], []).append(instance["url"])
        yield Stage(f"http://127.0.0.1:{port}", engines)
    finally:
        _cleave(folder, "down", name, must=False)


def _cleave(folder: Path, *words: str, timeout_s: float = 120, must: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "cleave.cli.main", *words],
        env=os.environ | {"CLEAVE_STATE_DIR": str(folder / "state")},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if must and done.returncode:
        raise StageError(f"cleave {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
