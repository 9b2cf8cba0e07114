"""Programs that others wrote, in an environment of their own: e2e/clients."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "e2e" / "clients"
PATIENCE_S = 900


def set_up() -> Path:
    """The folder of programs; downloads them when they have changed."""
    uv = shutil.which("uv", path=f"{os.environ['PATH']}:{ROOT}/.tools/bin")
    assert uv is not None, "uv is needed: scripts/bootstrap"
    run(uv, "sync", "--quiet", "--frozen", "--project", str(CLIENTS))
    return CLIENTS / ".venv/bin"


def run(*command: str, **environment: str) -> str:
    """What a program says, which must end well."""
    inherited = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    done = subprocess.run(
        command,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, (
        f"{' '.join(command)}\n{done.stdout[-9_000:]}{done.stderr[-9_000:]}"
    )
    return done.stdout
