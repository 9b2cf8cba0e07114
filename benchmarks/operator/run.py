"""How fast the operator makes pods, and what it costs, on a real control plane.

Each case gets a control plane of its own (scripts/cluster-tools builds it once), nodes that run
nothing, and one operator as its pod starts it. README.md says how to read the figures.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from operator_process import Operator  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from trial import Case, Outcome, run_trial  # noqa: E402

from e2e.cluster import tools  # noqa: E402
from e2e.cluster.client import Client  # noqa: E402
from e2e.cluster.control_plane import ControlPlane  # noqa: E402

NODES = 100
WIDTH = 130
CASES = (
    Case("1", deployments=1, prefill=1, decode=1, limit_s=120),
    Case("100", deployments=100, prefill=1, decode=1, limit_s=300),
    Case("1000", deployments=1_000, prefill=1, decode=1, limit_s=1_200),
    Case("10000-pods", deployments=100, prefill=20, decode=80, limit_s=1_800),
)


def measure(case: Case, rest_s: float, folder: Path) -> Outcome:
    """One case on a fresh control plane."""
    with ControlPlane(tools.folder(), folder) as control_plane:
        kubeconfig = control_plane.kubeconfig()
        kubectl = [str(tools.folder() / "kubectl"), "apply", "--server-side", "-f", ROOT / "crds"]
        subprocess.run(
            kubectl,
            env=os.environ | {"KUBECONFIG": str(kubeconfig)},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        with (
            run_fake_nodes(kubeconfig, folder),
            Operator(kubeconfig, folder / "operator.log") as operator,
        ):
            return asyncio.run(_run(kubeconfig, operator, case, rest_s))


async def _run(kubeconfig: Path, operator: Operator, case: Case, rest_s: float) -> Outcome:
    async with Client(kubeconfig) as api:
        return await run_trial(api, operator, case, rest_s)


@contextmanager
def run_fake_nodes(kubeconfig: Path, folder: Path):
    """The process in which the nodes live."""
    with (folder / "fake-nodes.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name("fake_nodes.py"), kubeconfig, str(NODES)],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError((folder / "fake-nodes.log").read_text()[-2_000:])
        yield
    finally:
        process.kill()
        process.wait()


def build_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(title="From apply to pods")
    table.add_column("deployments", justify="right", no_wrap=True)
    for column in (
        "pods", "p50 s", "p99 s", "all s", "ready s", "events", "CPU s", "us/event", "MiB",
        "writes at rest", "CPU", "others",
    ):  # fmt: skip
        table.add_column(column, justify="right", no_wrap=True)
    for outcome in outcomes:
        rest = outcome.rest
        table.add_row(
            f"{outcome.case.deployments:,}",
            f"{outcome.case.pods:,}",
            f"{outcome.created_p50_s:.2f}",
            f"{outcome.created_p99_s:.2f}",
            f"{outcome.all_created_s:.1f}",
            f"{outcome.all_ready_s:.1f}",
            f"{outcome.work.events:,}",
            f"{outcome.work.cpu_s:.1f}",
            f"{outcome.cpu_us_per_event:,.0f}",
            f"{outcome.peak_mib:.0f}",
            f"{rest.writes} in {rest.at_s:.0f} s",
            f"{rest.cpu_s / rest.at_s:.1%}",
            f"{outcome.others_cores:.1f}",
        )
    return table


def describe_machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--rest", type=float, default=75.0, metavar="S", help="after all is done")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse_arguments()
    progress = Console(stderr=True)
    outcomes = []
    for case in CASES:
        if case.name not in arguments.cases:
            continue
        progress.print(f"{case.deployments:,} deployments, {case.pods:,} pods", style="dim")
        with tempfile.TemporaryDirectory(prefix="cleave-operator-") as folder:
            outcomes.append(measure(case, arguments.rest, Path(folder)))
    if arguments.output == "json":
        cases = [asdict(outcome) for outcome in outcomes]
        print(json.dumps({"machine": describe_machine(), "cases": cases}, indent=2))
    else:
        Console(width=WIDTH).print(build_table(outcomes))
        print(f"- {describe_machine()}; control plane, nodes and operator share them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
