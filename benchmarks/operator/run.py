"""How fast the operator makes pods, and what it costs, on a real control plane.

Each case gets a control plane of its own (scripts/cluster-tools builds it once), nodes of one kind,
and operators with the rights and options of the chart. README.md says how to read the figures.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import psutil  # noqa: E402
import yaml  # noqa: E402
from api_server import OPERATOR  # noqa: E402
from node_processes import KINDS, NODE_USER, run_nodes  # noqa: E402
from operator_process import ACCOUNT_NAME, NAMESPACE, Operator  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from trial import Case, Cluster, Outcome, Usage, Waits, run_trial  # noqa: E402

from e2e.cluster import tools  # noqa: E402
from e2e.cluster.client import Client  # noqa: E402
from e2e.cluster.control_plane import ControlPlane  # noqa: E402

CASES = (
    Case("1", nodes=1, deployments=1, prefill=2, decode=3, limit_s=120),
    Case("10", nodes=10, deployments=10, prefill=2, decode=3, limit_s=300),
    Case("100", nodes=100, deployments=100, prefill=2, decode=3, limit_s=600),
    Case("300", nodes=300, deployments=300, prefill=2, decode=3, limit_s=1_200),
    Case("1000", nodes=1_000, deployments=1_000, prefill=2, decode=3, limit_s=2_400),
    Case("10000-pods", nodes=100, deployments=100, prefill=20, decode=80, limit_s=2_400),
)
PARTS = ("kube-apiserver", "etcd", "kube-controller-manager", "kube-scheduler")
RIGHTS = ("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding")
NODE_RIGHTS = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": NODE_USER.replace(":", "-")},
    "roleRef": {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "cluster-admin",
    },
    "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": NODE_USER}],
}
"""All hollow nodes are one user, for which the node authorizer knows no node."""


def measure(case: Case, kind: str, rest_s: float, folder: Path) -> Outcome:
    """One case on a fresh control plane."""
    with ControlPlane(tools.folder(), folder) as control_plane:
        install(control_plane)
        with run_nodes(kind, case.nodes, control_plane, folder) as nodes:
            parts = {name: control_plane.process(name) for name in PARTS} | dict(nodes)
            return asyncio.run(_run(control_plane, parts, case, kind, rest_s, folder))


def install(control_plane: ControlPlane) -> None:
    """The CRDs and the operator's rights, as `kubectl apply -f manifests`, but no pod of it."""
    objects = yaml.safe_load_all((ROOT / "manifests" / "cleave.yaml").read_text())
    rights = [each for each in objects if each and each["kind"] in RIGHTS]
    rights.append(NODE_RIGHTS)
    crds = "\n---\n".join(path.read_text() for path in sorted((ROOT / "crds").glob("*.yaml")))
    subprocess.run(
        [str(tools.folder() / "kubectl"), "apply", "--server-side", "-f", "-"],
        input=f"{crds}\n---\n{yaml.safe_dump_all(rights)}",
        env=os.environ | {"KUBECONFIG": str(control_plane.kubeconfig())},
        text=True,
        check=True,
        stdout=subprocess.DEVNULL,
    )


async def _run(
    control_plane: ControlPlane,
    parts: Mapping[str, psutil.Process],
    case: Case,
    kind: str,
    rest_s: float,
    folder: Path,
) -> Outcome:
    account = control_plane.service_account(NAMESPACE, ACCOUNT_NAME)

    def start_operator(leads: bool) -> Operator:
        return Operator(account, folder / "operator.log", leads=leads)

    async with Client(control_plane.kubeconfig()) as api:
        cluster = Cluster(api, start_operator, parts, kind != "process", say)
        return await run_trial(cluster, case, rest_s)


def say(text: object) -> None:
    """Show progress, apart from the result."""
    Console(stderr=True).print(text, style="dim")


def build_table(outcomes: Sequence[Outcome], kind: str) -> Table:
    """A column for each case."""
    table = Table(title=f"From apply to pods, {kind} nodes")
    table.add_column("", no_wrap=True)
    for outcome in outcomes:
        table.add_column(outcome.case.name, justify="right", no_wrap=True)
    columns = [_list_figures(outcome) for outcome in outcomes]
    for label in columns[0]:
        table.add_row(label, *(column[label] for column in columns))
    return table


def _list_figures(outcome: Outcome) -> dict[str, str]:
    case, work, rest, anchor = outcome.case, outcome.work, outcome.rest, outcome.anchor
    requests, failover, pods = outcome.requests, outcome.failover, outcome.case.pods
    created_s = outcome.waits["created"].all_s
    seats = requests.operator_seat_s / requests.at_s
    return {
        "nodes": f"{case.nodes:,}",
        "deployments": f"{case.deployments:,}",
        "workers": f"{pods:,}",
        **{
            f"{stage}: p50, p99, all, s": _format_waits(waits)
            for stage, waits in outcome.waits.items()
        },
        "one more: created, ready, s": _format_last(outcome.one_more),
        "workers/s": f"{pods / created_s:.0f}",
        "bare client: created/s": f"{anchor.pods / anchor.created_s:.0f}" if anchor else "",
        "bare client: ready/s": f"{anchor.pods / anchor.ready_s:.0f}" if anchor else "",
        "operator: CPU s": f"{work.cpu_s:.1f}",
        "operator: ms/deployment": f"{1e3 * work.cpu_s / case.deployments:.0f}",
        "operator: us/event": f"{1e6 * work.cpu_s / max(work.events, 1):,.0f}",
        "operator: peak MiB": f"{outcome.peak_mib:.0f}",
        "operator: writes": f"{work.writes:,}",
        "operator: requests": f"{requests.clients.get(OPERATOR, 0):,}",
        "all requests": f"{sum(requests.verbs.values()):,}",
        "operator: seats, of": f"{seats:.2f}, {requests.operator_seats}",
        "operator: wait for seats, s": f"{requests.operator_wait_s:.1f}",
        "rejected (429)": f"{requests.rejected}",
        "CPU s of parts": _format_parts(outcome.usage),
        "rest: writes": f"{rest.writes} in {rest.at_s:.0f} s",
        "rest: operator's CPU": f"{rest.cpu_s / rest.at_s:.1%}",
        "rest: operator's requests": f"{outcome.rest_requests.clients.get(OPERATOR, 0):,}",
        "rest: all requests/s": f"{_rate(outcome):.0f}",
        "rest: CPU s of parts": _format_parts(outcome.rest_usage),
        "standby: s, CPU s to fill": f"{failover.filled_s:.1f}, {failover.filled_cpu_s:.1f}",
        "failover: leads, settled, s": f"{failover.leading_s:.1f}, {failover.settled_s:.1f}",
        "failover: CPU s, writes": f"{failover.work.cpu_s:.1f}, {failover.work.writes}",
        "after it: created, ready, s": _format_last(outcome.after_failover),
        "others, cores": f"{outcome.others_cores:.1f}",
    }


def _format_waits(waits: Waits) -> str:
    return f"{waits.p50_s:.2f}, {waits.p99_s:.2f}, {waits.all_s:.1f}"


def _format_last(waits: Mapping[str, Waits]) -> str:
    return f"{waits['created'].all_s:.2f}, {waits['ready'].all_s:.2f}"


def _format_parts(usage: Usage) -> str:
    shorter = {name.removeprefix("kube-"): used for name, used in usage.cpu_s.items()}
    return ", ".join(f"{name} {used:.0f}" for name, used in shorter.items())


def _rate(outcome: Outcome) -> float:
    return sum(outcome.rest_requests.verbs.values()) / outcome.rest_requests.at_s


def describe_machine() -> str:
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = [case.name for case in CASES]
    parser.add_argument("--nodes", choices=KINDS, default="fake", help="kind of nodes")
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--rest", type=float, default=75.0, metavar="S", help="after all is done")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    return parser.parse_args(arguments)


def main() -> int:
    arguments = parse_arguments()
    outcomes = []
    for case in CASES:
        if case.name not in arguments.cases:
            continue
        say(f"{case.deployments:,} deployments, {case.pods:,} workers")
        with tempfile.TemporaryDirectory(prefix="cleave-operator-") as folder:
            outcomes.append(measure(case, arguments.nodes, arguments.rest, Path(folder)))
    if arguments.output == "json":
        cases = [asdict(outcome) for outcome in outcomes]
        print(json.dumps({"machine": describe_machine(), "cases": cases}, indent=2))
    else:
        Console(width=200).print(build_table(outcomes, arguments.nodes))
        print(f"- {describe_machine()}; control plane, nodes and operator share them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
