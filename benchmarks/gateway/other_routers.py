"""Other routers that are measured in the same rounds, installed where nothing else looks.

Called by stage.py. A rival that cannot be installed (no network) is left out and named so.
"""

import shutil
import subprocess
import sys
from pathlib import Path

SGLANG_ROUTER = "sglang-router==0.3.2"
CACHE = Path.home() / ".cache" / "cleave" / "bench"
INSTALL_S = 240


def install_sglang_router() -> Path | None:
    """Python of an environment that has it, made at first use; None: it cannot be had."""
    folder = CACHE / SGLANG_ROUTER.replace("==", "-")
    python = folder / "bin" / "python"
    if imports(python):
        return python
    shutil.rmtree(folder, ignore_errors=True)
    uv = shutil.which("uv")
    if uv is not None:
        commands = [
            [uv, "venv", "--quiet", "--python", sys.executable, str(folder)],
            [uv, "pip", "install", "--quiet", "--python", str(python), SGLANG_ROUTER],
        ]
    else:
        commands = [
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", SGLANG_ROUTER],
        ]
    try:
        for command in commands:
            subprocess.run(command, check=True, timeout=INSTALL_S, capture_output=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return python if imports(python) else None


def imports(python: Path) -> bool:
    """Whether what was installed there can be started."""
    command = [str(python), "-c", "import sglang_router.launch_router"]
    return python.exists() and not subprocess.run(command, capture_output=True).returncode


def build_sglang_command(python: Path, address: str, metrics_port: int) -> list[str]:
    """The router without its engines; in its fastest policy, saying as little as it can."""
    host, port = address.split(":")
    command = [str(python), "-m", "sglang_router.launch_router", "--host", host, "--port", port]
    command += ["--policy", "round_robin", "--log-level", "error"]
    return [*command, "--prometheus-host", host, "--prometheus-port", str(metrics_port)]
