"""`cleave provision`: chooses kinds and numbers of machines for prefill and for decode."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from cleave.cli.options import DocumentFormat, DocumentOutput, File
from cleave.cli.output import tables
from cleave.cli.output.errors import BAD_INPUT, FAILED, fail, report_input_errors
from cleave.cli.output.progress_bar import show_simulation_progress
from cleave.cli.planning.inputs import Overrides, Rate, Seed, TraceFile, read_planning_input

if TYPE_CHECKING:
    from cleave.planner.plan import Percentiles
    from cleave.planner.problem import Problem
    from cleave.planner.provision.search import ClusterDesign, ProvisioningRequest

_OPTION_NAMES = (
    ("goal Throughput", "--goal throughput"),
    ("max_cost_per_hour", "--max-cost"),
    ("max_power_watts", "--max-power"),
    ("max_machines", "--max-machines"),
)
"""Names of fields in errors of the planner, and the options that set them."""


class ProvisionObjective(StrEnum):
    """The quantity to optimize."""

    THROUGHPUT = "throughput"
    COST = "cost"
    POWER = "power"


def provision(
    file: File,
    cluster: Annotated[
        Path,
        Option(help="YAML file with one node of each kind to choose from.", show_default=False),
    ],
    goal: Annotated[
        ProvisionObjective,
        Option(help="Highest throughput for a budget, or lowest cost or power for a rate."),
    ] = ProvisionObjective.COST,
    max_cost: Annotated[float | None, Option(help="Budget per hour in US dollars.")] = None,
    max_power: Annotated[float | None, Option(help="Budget of provisioned power in watts.")] = None,
    token_cap: Annotated[
        float | None,
        Option(
            min=0.5,
            max=1,
            help="Also consider decode machines capped to this share of their power.",
        ),
    ] = None,
    reference: Annotated[
        str | None,
        Option(help="GPU whose node has slowdown 1. Default: the slowest of the cluster."),
    ] = None,
    max_machines: Annotated[
        int, Option(min=1, max=1024, help="Maximum number of machines of each kind.")
    ] = 128,
    output: DocumentOutput = DocumentFormat.TABLE,
    rate: Rate = None,
    trace: TraceFile = None,
    seed: Seed = 0,
) -> None:
    """Choose kinds and numbers of machines for prefill and decode, as Splitwise does.

    A machine is an entire node. Nine slowdowns relative to a single request on the reference
    machine must be met: P50/P90/P99 of TTFT (2, 3, 6), and of time between tokens and end-to-end
    latency (1.25, 1.5, 5 each). spec.slo is ignored. The cluster file lists the kinds of nodes;
    their counts are ignored.

    Exit codes: 0 found, 1 no cluster meets the slowdowns, 2 the input is invalid.

    \b
    Examples:
      # Find the cheapest machines for 40 requests per second
      cleave provision -f chat.yaml --cluster examples/cluster-mixed.yaml --rate 40
      # Maximize throughput within a power budget
      cleave provision -f chat.yaml --cluster examples/cluster-mixed.yaml \\
        --goal throughput --max-power 408000 --token-cap 0.5
    """
    from cleave.planner.provision import search

    problem = read_planning_input(file, cluster, Overrides(rate, trace), seed).problem
    try:
        with report_input_errors(), show_simulation_progress("provisioning") as tick:
            request = replace(
                _build_request(problem, cluster, token_cap, reference),
                objective=search.ProvisioningObjective[goal.name],
                rate=None if goal is ProvisionObjective.THROUGHPUT else problem.rate,
                max_cost_per_hour=max_cost,
                max_power_watts=max_power,
                max_machines=max_machines,
                seed=seed,
            )
            designs = search.provision(request, tick)
    except search.ProvisioningError as error:
        fault = str(error)
        for name, option in _OPTION_NAMES:
            fault = fault.replace(name, option)
        fail([fault], BAD_INPUT)
    if not designs:
        line = f"no cluster of up to {max_machines} machines of each kind meets the slowdowns"
        fail([f"{line}; use a lower rate, a larger budget or a slower --reference"], FAILED)
    if output is DocumentFormat.TABLE:
        _print_table(designs)
    else:
        show = tables.print_json if output is DocumentFormat.JSON else tables.print_yaml
        show(tables.convert_keys([asdict(design) for design in designs]))


def _build_request(
    problem: "Problem", cluster: Path, token_cap: float | None, reference: str | None
) -> "ProvisioningRequest":
    """The request with the machines of the cluster; the caller fills in goal and budgets."""
    from cleave.api.manifest import load_cluster
    from cleave.planner.provision import machines, search

    nodes = tokens = machines.list_nodes(problem)
    if token_cap is not None:
        found = load_cluster(cluster)
        capped = machines.apply_power_cap(problem, nodes, found, cluster.parent, token_cap)
        tokens = (*nodes, *capped)
    by_name = {node.machine.name: node.machine for node in nodes}
    if reference is not None and reference not in by_name:
        fault = f"--reference {reference}: must be one of {', '.join(by_name)}"
        raise search.ProvisioningError(fault)
    chosen = by_name[reference] if reference else machines.find_slowest(nodes, problem.demand)
    pairs = machines.build_pairs(problem.shape, nodes, tokens)
    cost = search.ProvisioningObjective.COST
    return search.ProvisioningRequest(problem.demand, pairs, chosen.estimate.timing, cost)


def _print_table(designs: Sequence["ClusterDesign"]) -> None:
    from rich.console import Console

    figures = ("PROMPT", "TOKEN", "REQ/S", "COST/H", "KW", "TTFT", "TPOT", "E2E")
    table = tables.build_plain_table(("MACHINES",), figures)
    for design in designs:
        slow = design.slowdowns
        table.add_row(
            design.name,
            str(design.num_prompt),
            str(design.num_token or "-"),
            f"{design.rate:.4g}",
            f"{design.cost_per_hour:,.2f}",
            f"{design.power_watts / 1000:,.1f}",
            *map(_format_percentiles, (slow.ttft, slow.tpot, slow.e2e)),
        )
    console = Console(highlight=False)
    tables.print_full_width(console, table)
    console.print("TTFT, TPOT, E2E: slowdown at P50/P90/P99", style="dim")


def _format_percentiles(slowdown: "Percentiles") -> str:
    return "/".join(f"{each:.2f}" for each in (slowdown.p50, slowdown.p90, slowdown.p99))
