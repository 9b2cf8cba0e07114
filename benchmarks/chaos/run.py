"""Hurts a fleet under load and checks every answer: `run.py emulated`, `vllm` or `cluster`.

Exit code 0: nothing was wrong; 1: something was, and the seed and what went on around it are
printed. README.md says what is hurt and what must hold.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from on_cluster import hurt_control_plane  # noqa: E402
from on_vllm import hurt_vllm  # noqa: E402

from e2e.chaos import faults, network  # noqa: E402
from e2e.chaos.control_plane import ControlPlaneReport  # noqa: E402
from e2e.chaos.fleet import Shape, emulated_manifest, raised  # noqa: E402
from e2e.chaos.load import Load  # noqa: E402
from e2e.chaos.machine import Machine, own_machine  # noqa: E402
from e2e.chaos.report import Report, ReportProgress, print_report, run_storm  # noqa: E402
from e2e.chaos.requests import draw  # noqa: E402

STARTED_S = time.monotonic()
UP_S = 240
NAME = "chaos"


def hurt(
    folder: Path, options: argparse.Namespace, report_progress: ReportProgress
) -> Report | ControlPlaneReport:
    """The run that was asked for."""
    if options.what == "cluster":
        return hurt_control_plane(folder, options, report_progress)
    if options.what == "vllm":
        return hurt_vllm(Machine(folder), options, report_progress)
    with own_machine(folder) as machine:
        return hurt_emulated(machine, options, report_progress)


def hurt_emulated(
    machine: Machine, options: argparse.Namespace, report_progress: ReportProgress
) -> Report:
    """A storm over an emulated fleet."""
    shape, folder = Shape(options.prefill, options.decode, options.mixed), machine.folder
    with raised(emulated_manifest(NAME, shape), shape, folder, UP_S) as fleet:
        load = Load(
            fleet.gateways, lambda rng, n: draw(rng, n, NAME), options.clients, options.seed
        )
        gateways = {gateway.name: gateway.processes for gateway in fleet.gateways}
        drawn = faults.draw(
            random.Random(options.seed),
            options.faults,
            choose_kinds(options.only, machine),
            fleet.roles,
            gateways,
            options.gap,
        )
        storm = run_storm(
            fleet,
            machine,
            load,
            drawn,
            options.burst,
            options.seed,
            report_progress,
            lasting_s=STARTED_S + options.seconds - time.monotonic(),
        )
        return asyncio.run(storm)


def choose_kinds(only: list[str] | None, machine: Machine) -> dict[str, int]:
    """What may happen, and how often."""
    kinds = faults.WORKER_KINDS | faults.GATEWAY_KINDS | faults.FLEET_KINDS
    kinds |= {
        kind: weight for kind, weight in faults.MACHINE_KINDS.items() if kind in machine.kinds
    }
    if network.can_cut():
        kinds |= faults.CUTS
    if not only:
        return kinds
    kinds |= faults.SILENT_KINDS
    unknown = set(only) - kinds.keys()
    if unknown:
        sys.exit(f"--only: no such fault here: {', '.join(unknown)}; there are {', '.join(kinds)}")
    return {kind: kinds[kind] for kind in only}


def keep_bytecode() -> None:
    """Processes start all the time; without compiled modules that takes twice as long."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(ROOT / "build" / "bytecode"))


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "what", choices=("emulated", "vllm", "cluster"), nargs="?", default="emulated"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--burst", type=int, default=50, help="faults between two full checks")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="no fault begins later, the start included",
    )
    parser.add_argument("--gap", type=float, default=0.6, help="mean seconds between faults")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--prefill", type=int, default=3)
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--mixed", type=int, default=2)
    parser.add_argument("--only", action="append", metavar="KIND", help="of faults; repeatable")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse_arguments()
    keep_bytecode()
    network.isolate()
    # Ended from outside, a run still takes its fleet down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="cleave-chaos-") as folder,
        Progress(
            *columns, TextColumn("{task.description}"), console=Console(stderr=True)
        ) as progress,
    ):
        bar = progress.add_task("bringing the fleet up", total=None)

        def report_progress(what: str, done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total, description=what)

        report = hurt(Path(folder), options, report_progress)
    if options.output == "json":
        print(json.dumps(asdict(report), indent=2))
    elif isinstance(report, Report):
        print_report(report, Console())
    else:
        Console().print(asdict(report))
    return 1 if report.violation else 0


if __name__ == "__main__":
    sys.exit(main())
