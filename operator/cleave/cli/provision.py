"""`cleave provision`: which machines to get, and how many, for prompts and for tokens."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cleave.cli.bar import simulating_bar
from cleave.cli.faults import BAD_INPUT, FAILED, fail
from cleave.cli.question import Overrides, Rate, Seed, TraceFile, ask
from cleave.cli.up import File

if TYPE_CHECKING:
    from cleave.planner.plan import Percentiles
    from cleave.planner.problem import Problem
    from cleave.planner.provisioning import Design, Question


_OPTIONS = (
    ("goal Throughput", "--goal throughput"),
    ("max_cost_per_hour", "--max-cost"),
    ("max_power_watts", "--max-power"),
    ("max_machines", "--max-machines"),
)
"""What the question calls them, and what the user does."""


class Output(StrEnum):
    """How to print."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class Most(StrEnum):
    """What is looked for."""

    THROUGHPUT = "throughput"
    COST = "cost"
    POWER = "power"


def provision(
    file: File,
    cluster: Annotated[
        Path,
        typer.Option(help="YAML file with a node of each kind to choose from.", show_default=False),
    ],
    goal: Annotated[
        Most, typer.Option(help="Most throughput for a budget, or least cost or power for a rate.")
    ] = Most.COST,
    max_cost: Annotated[
        float | None, typer.Option(help="Budget per hour, in the prices' currency.")
    ] = None,
    max_power: Annotated[float | None, typer.Option(help="Budget in watts, provisioned.")] = None,
    token_cap: Annotated[
        float | None,
        typer.Option(min=0.5, max=1, help="Also token machines held to this share of their power."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(help="GPU whose node is slowdown 1; absent: the slowest of the cluster."),
    ] = None,
    max_machines: Annotated[
        int, typer.Option(min=1, max=1024, help="Most machines of each kind.")
    ] = 128,
    output: Annotated[Output, typer.Option("--output", "-o", help="Format.")] = Output.TABLE,
    rate: Rate = None,
    trace: TraceFile = None,
    seed: Seed = 0,
) -> None:
    """Choose kinds and numbers of machines for prompts and tokens, as Splitwise does.

    A machine is a whole node. Nine slowdowns against a request alone on the reference machine have
    to hold: P50/P90/P99 of TTFT (2, 3, 6), time between tokens and end to end (1.25, 1.5, 5 each);
    spec.slo is not looked at. The cluster file says which kinds there are, not how many.

    Exit codes: 0 found, 1 no cluster holds the slowdowns, 2 bad input.

    Example: cleave provision -f chat.yaml --cluster examples/cluster-mixed.yaml --rate 40

    Example: cleave provision -f chat.yaml --cluster examples/cluster-mixed.yaml
    --goal throughput --max-power 224000 --token-cap 0.5
    """
    from cleave.api.manifest import ManifestError
    from cleave.planner.provisioning import Goal, ProvisioningError
    from cleave.planner.provisioning import provision as search

    problem = ask(file, cluster, Overrides(rate, trace), seed).problem
    try:
        question = replace(
            _question(problem, cluster, token_cap, reference),
            goal=Goal[goal.name],
            rate=None if goal is Most.THROUGHPUT else problem.rate,
            max_cost_per_hour=max_cost,
            max_power_watts=max_power,
            max_machines=max_machines,
            seed=seed,
        )
        with simulating_bar("provisioning") as tick:
            designs = search(question, tick)
    except ProvisioningError as error:
        fail([_in_options(str(error))], BAD_INPUT)
    except ManifestError as error:
        fail(error.faults, BAD_INPUT)
    if not designs:
        line = f"no cluster of up to {max_machines} machines of each kind holds the slowdowns"
        fail([f"{line}; state a lower rate, a larger budget or a slower --reference"], FAILED)
    _print(designs, output)


def _in_options(fault: str) -> str:
    """The fault with the options' names instead of the question's."""
    for name, option in _OPTIONS:
        fault = fault.replace(name, option)
    return fault


def _question(
    problem: "Problem", cluster: Path, token_cap: float | None, reference: str | None
) -> "Question":
    """With the machines of the cluster; what is asked of them is filled in by the caller."""
    from cleave.api.manifest import load_cluster
    from cleave.planner import machines
    from cleave.planner.provisioning import Goal, ProvisioningError, Question

    found = machines.nodes(problem)
    tokens = found
    if token_cap is not None:
        held = machines.capped(problem, found, load_cluster(cluster), cluster.parent, token_cap)
        tokens = (*found, *held)
    known = {node.machine.name: node.machine for node in found}
    if reference is not None and reference not in known:
        raise ProvisioningError(f"--reference {reference}: there is {', '.join(known)}")
    chosen = known[reference] if reference else machines.slowest(found, problem.demand)
    pairs = machines.pairs(problem.shape, found, tokens)
    return Question(problem.demand, pairs, chosen.estimate.timing, Goal.COST)


def _print(designs: Sequence["Design"], output: Output) -> None:
    if output is Output.TABLE:
        _show(designs)
        return
    found = [asdict(design) for design in designs]
    if output is Output.JSON:
        import json

        typer.echo(json.dumps(found, indent=2))
    else:
        import yaml

        typer.echo(yaml.safe_dump(found, sort_keys=False), nl=False)


def _show(designs: Sequence["Design"]) -> None:
    from rich.console import Console

    from cleave.cli.tables import plain_table, print_whole

    figures = ("PROMPT", "TOKEN", "REQ/S", "COST/H", "KW", "TTFT", "TPOT", "E2E")
    table = plain_table(("MACHINES",), figures)
    for design in designs:
        slow = design.slowdowns
        table.add_row(
            design.name,
            str(design.num_prompt),
            str(design.num_token or "-"),
            f"{design.rate:.4g}",
            f"{design.cost_per_hour:,.2f}",
            f"{design.power_watts / 1000:,.1f}",
            *map(_shown, (slow.ttft, slow.tpot, slow.e2e)),
        )
    console = Console(highlight=False)
    print_whole(console, table)
    console.print("TTFT, TPOT, E2E: slowdown at P50/P90/P99", style="dim")


def _shown(slowdown: "Percentiles") -> str:
    return "/".join(f"{each:.2f}" for each in (slowdown.p50, slowdown.p90, slowdown.p99))
