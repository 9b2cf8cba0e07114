"""`cleave simulate`: what a placement does with its workload, request by request."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from cleave.cli.bar import simulating_bar
from cleave.cli.faults import BAD_INPUT, fail
from cleave.cli.question import (
    ClusterFile,
    Overrides,
    Question,
    Rate,
    Seed,
    TpotTarget,
    TraceFile,
    TtftTarget,
    ask,
)
from cleave.cli.up import File

if TYPE_CHECKING:
    from cleave.planner.bench import Bench
    from cleave.planner.plan import PlannedPool

    Pools = Sequence[PlannedPool]


class Output(StrEnum):
    """How to print."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def simulate(
    file: File,
    cluster: ClusterFile = None,
    output: Annotated[
        Output, typer.Option("--output", "-o", help="Format; csv has a line per request.")
    ] = Output.TABLE,
    requests: Annotated[
        int, typer.Option(min=1, max=5_000_000, help="Requests to simulate at each rate.")
    ] = 10_000,
    rates: Annotated[
        str | None, typer.Option(help="Several rates with commas between: a line for each.")
    ] = None,
    rate: Rate = None,
    trace: TraceFile = None,
    slo_ttft: TtftTarget = None,
    slo_tpot: TpotTarget = None,
    seed: Seed = 0,
) -> None:
    """Simulate the placement of a manifest under its workload.

    Shows latencies, attainment, the five stages of a request's life and every instance's load.
    Without spec.placement there is one prefill and one decode instance.

    Exit codes: 0 simulated, 2 bad input.

    Example: cleave simulate -f examples/planned.yaml --rates 1,2,4,8

    Example: cleave simulate -f chat.yaml --cluster cluster.yaml --requests 100000 -o csv
    """
    asked = _rates(rates)
    if output is Output.CSV and len(asked) > 1:
        fail(["--rates with -o csv: state one rate, or -o json"], BAD_INPUT)
    question = ask(file, cluster, Overrides(rate, trace, slo_ttft, slo_tpot), seed)
    bench, pools = _prepare(question, requests)
    asked = asked or [question.problem.rate]
    if output is Output.CSV:
        _print_requests(bench, pools, asked[0])
    else:
        _print_figures(bench, pools, asked, output)


def _prepare(question: Question, num_requests: int) -> tuple["Bench", "Pools"]:
    from cleave.planner import bench
    from cleave.planner.placement import PlanError, plan

    try:
        pools = bench.limited(plan(question.deployment).pools, question.deployment.spec.engine)
        bench.fleet(question.problem, pools)
    except PlanError as error:
        fail(error.faults, BAD_INPUT)
    return bench.Bench(question.problem, num_requests), pools


def _print_requests(bench: "Bench", pools: "Pools", rate: float) -> None:
    from cleave.cli.simulate_table import write_csv
    from cleave.planner import bench as benches
    from cleave.planner.digest import instance_names

    fleet = benches.fleet(bench.problem, pools)
    with _simulations():
        outcome = bench.run(fleet, rate)
    write_csv(sys.stdout, outcome, instance_names(fleet))


def _print_figures(bench: "Bench", pools: "Pools", rates: Sequence[float], output: Output) -> None:
    from cleave.cli import simulate_table
    from cleave.planner import bench as benches
    from cleave.planner.digest import digest

    problem, found = bench.problem, []
    slo, fleet = problem.slo, benches.fleet(problem, pools)
    with _simulations(), simulating_bar("simulating") as tick:
        for done, rate in enumerate(rates):
            tick(done, len(rates), f"simulating {rate:g} req/s")
            outcome = bench.run(fleet, rate)
            mfu = benches.mfu(problem, pools, outcome)
            found.append(digest(outcome, fleet, rate, slo, mfu))
    if output is Output.JSON:
        typer.echo(json.dumps(simulate_table.document(found), indent=2))
        return
    from rich.console import Console

    console = Console()
    if len(found) > 1:
        simulate_table.show_many(console, found, slo)
    else:
        simulate_table.show_one(console, found[0], slo)


@contextmanager
def _simulations() -> Iterator[None]:
    """Tell in one line why a simulation is refused."""
    from cleave.simulator.errors import SimulationError

    try:
        yield
    except SimulationError as error:
        fail([str(error)], BAD_INPUT)


def _rates(text: str | None) -> list[float]:
    if text is None:
        return []
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        fail([f"--rates {text}: must be numbers with commas between, such as 1,2,4"], BAD_INPUT)
    if any(not 0 < rate < 1e6 for rate in rates):
        fail([f"--rates {text}: every rate must be above 0 and below 1,000,000"], BAD_INPUT)
    return rates
