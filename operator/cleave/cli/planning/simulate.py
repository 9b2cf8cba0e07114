"""`cleave simulate`: simulates a placement under its workload, request by request."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from cleave.cli.local.up import File
from cleave.cli.output.errors import BAD_INPUT, fail
from cleave.cli.output.progress_bar import simulating_bar
from cleave.cli.planning.inputs import (
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

if TYPE_CHECKING:
    from cleave.planner.plan import PlannedPool
    from cleave.planner.pool_simulation import Bench

    Pools = Sequence[PlannedPool]


class Output(StrEnum):
    """Output format."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def simulate(
    file: File,
    cluster: ClusterFile = None,
    output: Annotated[
        Output,
        typer.Option("--output", "-o", help="Output format; csv prints one line per request."),
    ] = Output.TABLE,
    requests: Annotated[
        int, typer.Option(min=1, max=5_000_000, help="Number of requests to simulate at each rate.")
    ] = 10_000,
    rates: Annotated[
        str | None, typer.Option(help="Comma-separated rates (req/s); prints one line per rate.")
    ] = None,
    rate: Rate = None,
    trace: TraceFile = None,
    slo_ttft: TtftTarget = None,
    slo_tpot: TpotTarget = None,
    seed: Seed = 0,
) -> None:
    """Simulate the placement of a manifest under its workload.

    Prints latencies, SLO attainment, the time in each of the five stages of a request, and the
    load of every instance. Without spec.placement, one prefill and one decode instance are
    simulated.

    Exit codes: 0 simulated, 2 the input is invalid.

    \b
    Examples:
      # Compare four rates
      cleave simulate -f examples/planned.yaml --rates 1,2,4,8
      # Write the simulated requests as CSV
      cleave simulate -f chat.yaml --cluster cluster.yaml --requests 100000 -o csv
    """
    requested = _rates(rates)
    if output is Output.CSV and len(requested) > 1:
        fail(["--rates with -o csv: give a single rate, or use -o json"], BAD_INPUT)
    question = ask(file, cluster, Overrides(rate, trace, slo_ttft, slo_tpot), seed)
    bench, pools = _prepare(question, requests)
    requested = requested or [question.problem.rate]
    if output is Output.CSV:
        _print_requests(bench, pools, requested[0])
    else:
        _print_figures(bench, pools, requested, output)


def _prepare(question: Question, num_requests: int) -> tuple["Bench", "Pools"]:
    from cleave.planner import pool_simulation
    from cleave.planner.placement import PlanError, plan

    try:
        pools = pool_simulation.limited(
            plan(question.deployment).pools, question.deployment.spec.engine
        )
        pool_simulation.fleet(question.problem, pools)
    except PlanError as error:
        fail(error.faults, BAD_INPUT)
    return pool_simulation.Bench(question.problem, num_requests), pools


def _print_requests(bench: "Bench", pools: "Pools", rate: float) -> None:
    from cleave.cli.planning.simulate_table import write_csv
    from cleave.planner import pool_simulation as benches
    from cleave.planner.result.simulation_summary import instance_names

    fleet = benches.fleet(bench.problem, pools)
    with _simulations():
        outcome = bench.run(fleet, rate)
    write_csv(sys.stdout, outcome, instance_names(fleet))


def _print_figures(bench: "Bench", pools: "Pools", rates: Sequence[float], output: Output) -> None:
    from cleave.cli.planning import simulate_table
    from cleave.planner import pool_simulation as benches
    from cleave.planner.result.simulation_summary import digest

    problem, results = bench.problem, []
    slo, fleet = problem.slo, benches.fleet(problem, pools)
    with _simulations(), simulating_bar("simulating") as tick:
        for done, rate in enumerate(rates):
            tick(done, len(rates), f"simulating {rate:g} req/s")
            outcome = bench.run(fleet, rate)
            mfu = benches.mfu(problem, pools, outcome)
            results.append(digest(outcome, fleet, rate, slo, mfu))
    if output is Output.JSON:
        typer.echo(json.dumps(simulate_table.document(results), indent=2))
        return
    from rich.console import Console

    console = Console()
    if len(results) > 1:
        simulate_table.show_many(console, results, slo)
    else:
        simulate_table.show_one(console, results[0], slo)


@contextmanager
def _simulations() -> Iterator[None]:
    """Report SimulationError in one line and exit with code 2."""
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
        fail([f"--rates {text}: must be comma-separated numbers, such as 1,2,4"], BAD_INPUT)
    if any(not 0 < rate < 1e6 for rate in rates):
        fail([f"--rates {text}: every rate must be above 0 and below 1,000,000"], BAD_INPUT)
    return rates
