"""What a user waits for: whole commands in fresh processes, with and without compiled code.

Called by run.py. Wall time, of processes that inherit the benchmark's core.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TIMEOUT_S = 300.0
SIMULATE = (
    "from speed import pairs; from cleave.traffic.workload import build_fixed; "
    "from cleave.simulator.run import simulate; "
    "simulate(pairs(1), build_fixed(512, 64, 4.0).draw(100))"
)
PLAN = ("plan", "-f", "examples/planned.yaml", "--cluster", "examples/cluster.yaml")


class CommandError(RuntimeError):
    """A measured command failed."""


@dataclass(frozen=True, slots=True)
class Waits:
    """Seconds of one round."""

    help_s: float
    """`cleave --help`: what every command pays."""
    simulate_cold_s: float
    """Imports, compilation and 100 requests."""
    simulate_warm_s: float
    """The same with compiled code on disk."""
    plan_cold_s: float
    plan_warm_s: float


def measure() -> Waits:
    """One round, each in a process of its own. Raises CommandError."""
    cleave = [str(Path(sys.executable).with_name("cleave"))]
    simulation = [sys.executable, "-c", SIMULATE]
    plan = [*cleave, *PLAN]
    with tempfile.TemporaryDirectory() as simulated, tempfile.TemporaryDirectory() as planned:
        return Waits(
            help_s=_wait([*cleave, "--help"], planned),
            simulate_cold_s=_wait(simulation, simulated),
            simulate_warm_s=_wait(simulation, simulated),
            plan_cold_s=_wait(plan, planned),
            plan_warm_s=_wait(plan, planned),
        )


def _wait(command: Sequence[str], cache: str) -> float:
    """Seconds until the command ends; `cache` is where compiled code lies or will."""
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"NUMBA_CACHE_DIR": cache, "PYTHONPATH": path}
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise CommandError(f"{' '.join(command[1:])[:60]}: {last[0]}")
    return seconds
