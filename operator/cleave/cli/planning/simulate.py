"""`cleave simulate`: simulates a placement under its workload, request by request."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from typer import Option

from cleave.cli.options import File
from cleave.cli.output.errors import BAD_INPUT, fail, report_input_errors
from cleave.cli.output.progress_bar import show_simulation_progress
from cleave.cli.output.tables import print_json
from cleave.cli.planning import inputs

if TYPE_CHECKING:
    from cleave.planner.plan import PlannedPool
    from cleave.planner.pool_simulation import PlacementSimulator

    Pools = Sequence[PlannedPool]


class SimulateFormat(StrEnum):
    """Output format."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def simulate(
    file: File,
    cluster: inputs.ClusterFile = None,
    output: Annotated[
        SimulateFormat,
        Option("--output", "-o", help="Output format; csv prints one line per request."),
    ] = SimulateFormat.TABLE,
    requests: Annotated[
        int | None,
        Option(
            min=1,
            max=5_000_000,
            help="Number of requests to simulate at each rate. Without it: 10,000, and at a high "
            "rate as many more as show that a fleet is too small.",
        ),
    ] = None,
    rates: Annotated[
        str | None, Option(help="Comma-separated rates (req/s); prints one line per rate.")
    ] = None,
    rate: inputs.Rate = None,
    trace: inputs.TraceFile = None,
    slo_ttft: inputs.TtftTarget = None,
    slo_tpot: inputs.TpotTarget = None,
    slo_itl_p99: inputs.ItlTarget = None,
    seed: inputs.Seed = 0,
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
    from cleave.api.manifest import load_cluster
    from cleave.planner import left_out

    requested = _parse_rates(rates)
    if output is SimulateFormat.CSV and len(requested) > 1:
        fail(["--rates with -o csv: give a single rate, or use -o json"], BAD_INPUT)
    overrides = inputs.Overrides(rate, trace, slo_ttft, slo_tpot, slo_itl_p99)
    planning_input = inputs.read_planning_input(file, cluster, overrides, seed)
    if cluster is not None:
        with report_input_errors():
            machines = load_cluster(cluster)
            inputs.check_manual_placement(planning_input.deployment, machines, file.parent)
    simulator, pools = _prepare(planning_input, requests)
    if missing := left_out.describe_manual(planning_input.deployment.spec):
        sys.stderr.write(f"note: {missing}\n")
    requested = requested or [planning_input.problem.rate]
    if output is SimulateFormat.CSV:
        _print_requests(simulator, pools, requested[0])
    else:
        is_set = planning_input.deployment.spec.placement is not None
        _print_figures(simulator, pools, requested, output, is_set=is_set)


def _prepare(
    planning_input: inputs.PlanningInput, requests: int | None
) -> tuple["PlacementSimulator", "Pools"]:
    from cleave.planner import pool_simulation
    from cleave.planner.placement import choose_placement
    from cleave.planner.resolved_deployment import resolve

    deployment, problem = planning_input.deployment, planning_input.problem
    with report_input_errors():
        pools = choose_placement(resolve(deployment)).pools
        pool_simulation.build_fleet(problem, pools)
        simulator = pool_simulation.PlacementSimulator(
            problem, requests or 10_000, is_least=requests is None
        )
        simulator.check_memory()
    return simulator, pools


def _print_requests(simulator: "PlacementSimulator", pools: "Pools", rate: float) -> None:
    from cleave.cli.planning.simulate_table import write_csv
    from cleave.planner import pool_simulation
    from cleave.planner.result.simulation_summary import list_instance_names

    fleet = pool_simulation.build_fleet(simulator.problem, pools)
    with _report_simulation_errors():
        outcome = simulator.simulate(fleet, rate)
    write_csv(sys.stdout, outcome, list_instance_names(fleet))


def _print_figures(
    simulator: "PlacementSimulator",
    pools: "Pools",
    rates: Sequence[float],
    output: SimulateFormat,
    *,
    is_set: bool,
) -> None:
    """`is_set`: whether the pools are those of spec.placement."""
    from cleave.cli.planning import simulate_table
    from cleave.planner import pool_simulation
    from cleave.planner.result.simulation_summary import summarize

    problem, results = simulator.problem, []
    slo, fleet = problem.slo, pool_simulation.build_fleet(problem, pools)
    has_blocks = problem.demand.has_reuse
    with _report_simulation_errors(), show_simulation_progress("simulating", has_blocks) as tick:
        for done, rate in enumerate(rates):
            tick(done, len(rates), f"simulating {rate:g} req/s")
            outcome = simulator.simulate(fleet, rate)
            mfu = pool_simulation.compute_mfu(problem, pools, outcome)
            results.append(summarize(outcome, fleet, rate, slo, mfu))
    if output is SimulateFormat.JSON:
        print_json(simulate_table.build_document(results))
        return
    from rich.console import Console

    console = Console()
    simulate_table.show_placement(console, pools, is_set=is_set)
    if len(results) > 1:
        simulate_table.show_many(console, results, slo)
    else:
        simulate_table.show_one(console, results[0], slo)


@contextmanager
def _report_simulation_errors() -> Iterator[None]:
    """Report SimulationError in one line and exit with code 2."""
    from cleave.simulator.validation import SimulationError

    try:
        yield
    except SimulationError as error:
        fail([str(error)], BAD_INPUT)


def _parse_rates(text: str | None) -> list[float]:
    if text is None:
        return []
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        fail([f"--rates {text}: must be comma-separated numbers, such as 1,2,4"], BAD_INPUT)
    if any(not 0 < rate < 1e6 for rate in rates):
        fail([f"--rates {text}: every rate must be above 0 and below 1,000,000"], BAD_INPUT)
    return rates
