"""`cleave plan`: finds a placement for model, workload, SLO and GPUs, and predicts its behavior."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from cleave.cli.options import File
from cleave.cli.output.errors import BAD_INPUT, FAILED, fail, report_input_errors
from cleave.cli.output.progress_bar import show_progress, show_simulation_progress
from cleave.cli.output.tables import print_json, print_yaml
from cleave.cli.planning import inputs
from cleave.cli.planning.inputs import PlanningInput

if TYPE_CHECKING:
    from cleave.api.deployment import LLMDeployment
    from cleave.planner.plan import Plan, PlanningResult
    from cleave.planner.problem import Problem


_FROZEN = (
    "note: with spec.placement the operator keeps these instances and plans no more; to have plans "
    "follow the traffic, apply the manifest without it"
)


class PlanFormat(StrEnum):
    """Output format."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


def plan(
    file: File,
    cluster: inputs.ClusterFile = None,
    output: Annotated[
        PlanFormat, Option("--output", "-o", help="Output format.")
    ] = PlanFormat.TABLE,
    top: Annotated[int, Option(min=1, max=100, help="Number of plans to show.")] = 5,
    explain: Annotated[
        bool,
        Option(
            "--explain",
            help="Explain how the plan was found and what its predictions are based on.",
        ),
    ] = False,
    report: Annotated[
        Path | None, Option(help="Write a report with charts to this HTML file.")
    ] = None,
    rate: inputs.Rate = None,
    trace: inputs.TraceFile = None,
    slo_ttft: inputs.TtftTarget = None,
    slo_tpot: inputs.TpotTarget = None,
    slo_itl_p99: inputs.ItlTarget = None,
    seed: inputs.Seed = 0,
) -> None:
    """Find the placement with the best goodput per GPU, and predict its latencies.

    The plan "2P tp4 + 1D tp2 pp2" has two prefill instances with tensor parallel size 4 and one
    decode instance with tensor parallel size 2 and pipeline parallel size 2. M stands for mixed.

    GOODPUT is the highest rate (req/s) at which the SLO is met. ATTAINED, TTFT and TPOT
    (P50/P90/P99) are predictions at the requested rate.

    Exit codes: 0 a plan was found, 1 no plan meets the SLO, 2 the input is invalid.

    \b
    Examples:
      # Find a plan and explain it
      cleave plan -f examples/planned.yaml --cluster examples/cluster.yaml --explain
      # Plan for another rate and write a report
      cleave plan -f chat.yaml --cluster cluster.yaml --rate 20 --report plan.html
      # Fill the plan into the manifest and apply it; the operator then plans no more
      cleave plan -f chat.yaml --cluster cluster.yaml -o yaml | kubectl apply -f -
    """
    if report is not None and not report.parent.is_dir():
        fail([f"--report {report}: folder {report.parent} does not exist"], BAD_INPUT)
    overrides = inputs.Overrides(rate, trace, slo_ttft, slo_tpot, slo_itl_p99)
    planning_input = inputs.read_planning_input(file, cluster, overrides, seed)
    if planning_input.deployment.spec.placement is not None:
        typer.echo("note: spec.placement is not used; cleave simulate predicts it", err=True)
    from cleave.planner import plan_search

    with report_input_errors(), show_simulation_progress("planning") as tick:
        result = plan_search.plan(planning_input.problem, tick)
    if output is PlanFormat.YAML and result.selected is not None:
        print_yaml(_build_manifest(planning_input.deployment, result, result.selected))
        typer.echo(_FROZEN, err=True)
    elif output is PlanFormat.YAML:
        typer.echo(f"error: {result.reason}; no manifest is printed", err=True)
    else:
        _print(planning_input.problem, result, output, top, explain)
    if report is not None:
        _write_report(planning_input, result, report)
    if result.selected is None:
        raise typer.Exit(FAILED)


def _print(
    problem: "Problem", result: "PlanningResult", output: PlanFormat, top: int, explain: bool
) -> None:
    if output is PlanFormat.JSON:
        from cleave.planner.result.status import build_document

        document = build_document(result, top - 1)
        if explain and result.selected:
            from cleave.planner.scaling_law import growth

            document["aladdin"] = growth.build_document(problem, result.selected)
        print_json(document)
    else:
        from rich.console import Console

        from cleave.cli.planning import plan_table

        console = Console()
        plan_table.show(console, result, top=top, wide=output is PlanFormat.WIDE)
        if explain:
            from cleave.cli.planning.explanation import print_explanation

            console.print()
            print_explanation(console, problem, result)


def _build_manifest(
    deployment: "LLMDeployment", result: "PlanningResult", chosen: "Plan"
) -> dict[str, Any]:
    """The manifest with the selected plan as spec.placement and status.plan."""
    from cleave.manifests.pool import build_selected_plan
    from cleave.planner.placement import Placement
    from cleave.planner.resolved_deployment import resolve_in_cluster
    from cleave.planner.result.status import build_manual_placement

    spec = deployment.spec.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    spec["placement"] = build_manual_placement(chosen)
    if chosen.max_model_len is not None:
        spec["model"]["max_model_len"] = chosen.max_model_len
    placement = Placement(chosen.pools, result.reason, result, chosen.max_model_len)
    status = build_selected_plan(resolve_in_cluster(deployment), placement)
    return {
        "apiVersion": deployment.api_version,
        "kind": deployment.kind,
        "metadata": inputs.dump_metadata(deployment),
        "spec": spec,
        "status": {"plan": status.model_dump(mode="json", exclude_none=True)},
    }


def _write_report(planning_input: PlanningInput, result: "PlanningResult", path: Path) -> None:
    from cleave.planner.result.neighbours import list_neighbours
    from cleave.report import load_study
    from cleave.report.page import render_page

    problem, plans = planning_input.problem, load_study.select_plans(result)
    with show_progress("simulating for the report"):
        neighbours = list_neighbours(problem, load_study.select_rivals(plans), plans)
        shown = load_study.build_report_input(planning_input.deployment, problem)
        simulator = load_study.build_simulator(problem)
        study = load_study.run_study(shown, result, simulator, neighbours)
    text = render_page(study)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail([f"{path} cannot be written: {error.strerror}"], FAILED)
    typer.echo(f"report: {path} ({len(text) / 1e6:.1f} MB)", err=True)
