"""`cleave status`: instances on this machine, as agents and the gateway report them now."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from cleave.cli.options import DocumentFormat, DocumentOutput, complete_running
from cleave.cli.output import tables
from cleave.cli.output.errors import report_local_errors

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cleave.local.state import DeploymentSnapshot
    from cleave.local.status import InstanceRow

WATCH_INTERVAL_S = 1.0
_NOTHING_RUNS = "no deployments running on this machine"
_REASON_WIDTH = 60
_STYLES = {"ready": "green", "starting": "yellow", "verifying": "cyan", "draining": "yellow"}


def status(
    name: Annotated[
        str | None,
        Argument(
            help="Name of the deployment. Default: all deployments.",
            autocompletion=complete_running,
        ),
    ] = None,
    output: DocumentOutput = DocumentFormat.TABLE,
    watch: Annotated[
        bool, Option("--watch", "-w", help="Refresh every second until Ctrl-C.")
    ] = False,
) -> None:
    """Show the instances of deployments on this machine, their load and the gateway.

    RUN and WAIT count running and waiting requests. KV% is the used share of the KV cache.
    RESTARTS counts restarts of the pod and of its engine.

    \b
    Examples:
      # Show all deployments on this machine
      cleave status
      # Print the deployment chat as JSON
      cleave status chat -o json
    """
    with report_local_errors():
        if not watch:
            _print(asyncio.run(collect(name)), output)
            if name is None:
                _report_orphaned()
        elif output is DocumentFormat.TABLE:
            _watch_table(name)
        else:
            while True:
                _print(asyncio.run(collect(name)), output)
                time.sleep(WATCH_INTERVAL_S)


async def collect(name: str | None) -> list[dict[str, Any]]:
    """Every running deployment (or `name` alone) with the rows of its instances."""
    from cleave.local import state

    folders = [state.find_running(name)] if name else state.list_running()
    read = await asyncio.gather(*(folder.read_restored() for folder in folders))
    snapshots = [each for each in read if each is not None]
    rows = await asyncio.gather(*map(_collect_rows, snapshots))
    return [
        {
            "deployment": snapshot.deployment,
            "url": snapshot.url,
            "plan": {key: part for key, part in snapshot.plan.items() if part not in ("", [])}
            or None,
            "instances": [asdict(row) for row in instance_rows],
        }
        for snapshot, instance_rows in zip(snapshots, rows, strict=True)
    ]


async def _collect_rows(snapshot: "DeploymentSnapshot") -> list["InstanceRow"]:
    from cleave.local import status as local_status
    from cleave.manifests.labels import GATEWAY

    rows, gateway = await asyncio.gather(
        local_status.collect_rows(snapshot), local_status.get_gateway_health(snapshot.url)
    )
    if gateway.serving:
        return rows
    # Where it answers, it knows better than its probe why it is not ready.
    states = {"ready": "not serving", **({"starting": "starting"} if gateway.has_answered else {})}
    return [
        replace(row, state=states[row.state], reason=gateway.reason)
        if row.role == GATEWAY and row.state in states
        else row
        for row in rows
    ]


def _print(deployments: list[dict[str, Any]], output: DocumentFormat) -> None:
    if output is DocumentFormat.JSON:
        tables.print_json(tables.convert_keys(deployments))
    elif output is DocumentFormat.YAML:
        tables.print_yaml(tables.convert_keys(deployments))
    else:
        from rich.console import Console

        show(Console(), deployments)


def _report_orphaned() -> None:
    from cleave.local import state

    for folder in state.list_orphaned():
        line = f"{folder.name}: its supervisor was killed; see `cleave logs {folder.name}`"
        typer.echo(f"{line}, clean up with `cleave down {folder.name}`", err=True)


def _watch_table(name: str | None) -> None:
    from rich.live import Live

    with Live(auto_refresh=False, screen=False) as live:
        while True:
            deployments = asyncio.run(collect(name))
            live.update(build_table(deployments) if deployments else _NOTHING_RUNS, refresh=True)
            time.sleep(WATCH_INTERVAL_S)


def show(console: "Console", deployments: Sequence[dict[str, Any]]) -> None:
    """Print the table in its full width, then failures and plans. Where the console is no terminal,
    a row is one line, and reasons follow the table."""
    if not deployments:
        console.print(_NOTHING_RUNS)
        return
    tables.print_full_width(console, build_table(deployments, with_reasons=console.is_terminal))
    for deployment in deployments:
        for row in deployment["instances"]:
            if row["reason"] and not console.is_terminal:
                tables.print_line(console, f"{row['instance']}: {row['reason']}")
            if failure := row["last_failure"]:
                tables.print_line(console, f"{row['instance']}: last failure: {failure}")
            if pairs := row["kv_pairs"]:
                tables.print_line(console, f"{row['instance']}: {pairs}")
        if weights := _explain_weights(deployment["instances"]):
            tables.print_line(console, f"{deployment['deployment']}: {weights}")
        if plan := deployment["plan"]:
            tables.print_line(console, f"{deployment['deployment']}: {_describe_plan(plan)}")


def _explain_weights(rows: Sequence[dict[str, Any]]) -> str:
    from cleave.rpc.weights_report import WeightsReport, explain_weights

    fields = ("instance", "weights", "weights_read_s", "weights_fault")
    return explain_weights([WeightsReport(*(row[field] for field in fields)) for row in rows])


def _describe_plan(plan: dict[str, Any]) -> str:
    """The reason for the placement, after its predicted goodput if there is a prediction."""
    predicted = plan.get("predicted")
    if predicted is None:
        return str(plan["reason"])
    expected = f"{predicted['goodput']:.3g} req/s within the SLO"
    return f"{plan['verdict'].lower()}, {expected} predicted. {plan['reason']}"


def build_table(deployments: Sequence[dict[str, Any]], *, with_reasons: bool = True) -> "Table":
    """The rows of all deployments in one table, with the reasons of states on second lines."""
    from rich.text import Text

    table = tables.build_plain_table(
        ("INSTANCE", "ROLE", "STATE", "ENGINE"), ("RUN", "WAIT", "KV%", "EPOCH", "RESTARTS", "PID")
    )
    table.add_column("URL", no_wrap=True)
    for row in (row for deployment in deployments for row in deployment["instances"]):
        state = Text(row["state"], style=_STYLES.get(row["state"], "red"))
        if with_reasons and row["reason"]:
            reason = Text(f"\n{row['reason']}", style="dim")
            reason.truncate(_REASON_WIDTH, overflow="ellipsis")
            state.append_text(reason)
        kv = row["kv_cache_usage"]
        load = (row["num_running"], row["num_waiting"], None if kv is None else f"{kv:.1%}"[:-1])
        figures = (*load, row["epoch"], row["restarts"], row["pid"])
        cells = ("-" if figure is None else str(figure) for figure in figures)
        table.add_row(row["instance"], row["role"], state, row["engine"], *cells, row["url"])
    return table
