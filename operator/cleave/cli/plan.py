"""`cleave plan`: from model, traffic, targets and GPUs to a placement, with what it will do."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cleave.cli.bar import progress_bar, simulating_bar
from cleave.cli.faults import BAD_INPUT, FAILED, fail
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
    from cleave.planner.plan import Answer


class Output(StrEnum):
    """How to print."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"


def plan(
    file: File,
    cluster: ClusterFile = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Format.")] = Output.TABLE,
    top: Annotated[int, typer.Option(min=1, max=100, help="Plans to show.")] = 5,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say how it was found and what it rests on.")
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write a page with charts to this HTML file.")
    ] = None,
    rate: Rate = None,
    trace: TraceFile = None,
    slo_ttft: TtftTarget = None,
    slo_tpot: TpotTarget = None,
    seed: Seed = 0,
) -> None:
    """Find the placement with the best goodput, and predict what it does.

    PLAN 2P tp4 + 1D tp2 pp2 is two prefill instances of tensor parallel size 4 and one decode
    instance of tensor 2 and pipeline 2; M is mixed.

    GOODPUT is the highest rate (req/s) at which the SLO holds. ATTAINED, TTFT and TPOT
    (P50/P90/P99) are predictions at the asked rate.

    `-o yaml` is the manifest with the plan filled in, for kubectl apply or cleave up.

    Exit codes: 0 a plan, 1 infeasible, 2 bad input.

    Example: cleave plan -f examples/planned.yaml --cluster examples/cluster.yaml --explain

    Example: cleave plan -f chat.yaml --cluster cluster.yaml --rate 20 --report plan.html
    """
    if report is not None and not report.parent.is_dir():
        fail([f"--report {report}: there is no folder {report.parent}"], BAD_INPUT)
    question = ask(file, cluster, Overrides(rate, trace, slo_ttft, slo_tpot), seed)
    answer = _search(question)
    _print(question, answer, output, top, explained=explain)
    if report is not None:
        _write_report(question, answer, report)
    if answer.selected is None:
        raise typer.Exit(FAILED)


def _search(question: Question) -> "Answer":
    from cleave.planner import search
    from cleave.planner.placement import PlanError

    try:
        with simulating_bar("planning") as tick:
            return search.plan(question.problem, tick)
    except PlanError as error:
        fail(error.faults, BAD_INPUT)


def _print(
    question: Question, answer: "Answer", output: Output, top: int, *, explained: bool
) -> None:
    if output is Output.JSON:
        import json

        from cleave.planner.summary import document

        told = document(answer, top - 1)
        if explained and answer.selected:
            from cleave.planner import growth

            told["aladdin"] = growth.document(question.problem, answer.selected)
        typer.echo(json.dumps(told, indent=2))
    elif output is Output.YAML:
        import yaml

        typer.echo(yaml.safe_dump(manifest(question, answer), sort_keys=False), nl=False)
    else:
        from rich.console import Console

        from cleave.cli import plan_table

        console = Console()
        plan_table.show(console, answer, top=top, wide=output is Output.WIDE)
        if explained:
            from cleave.cli.explanation import explain

            console.print()
            explain(console, question.problem, answer)


def manifest(question: Question, answer: "Answer") -> dict[str, Any]:
    """The deployment with the selected plan as its placement, and the plan as its status."""
    from cleave.planner.placement import Placement
    from cleave.planner.summary import placement
    from cleave.pods.pool import selected_plan

    deployment, chosen = question.deployment, answer.selected
    spec = deployment.spec.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    if chosen:
        spec["placement"] = placement(chosen)
    pools = chosen.pools if chosen else ()
    told = selected_plan(deployment, Placement(pools, answer.reason, answer))
    return {
        "apiVersion": deployment.api_version,
        "kind": deployment.kind,
        "metadata": {"name": deployment.name, "namespace": deployment.namespace},
        "spec": spec,
        "status": {"plan": told.model_dump(mode="json", exclude_none=True)},
    }


def _write_report(question: Question, answer: "Answer", path: Path) -> None:
    from cleave.planner.neighbours import neighbours
    from cleave.report.page import page
    from cleave.report.study import rivals, shown_plans, study
    from cleave.report.subject import bench, subject

    problem, plans = question.problem, shown_plans(answer)
    with progress_bar("simulating what the page shows"):
        beside = neighbours(problem, rivals(plans), plans)
        shown = study(subject(question.deployment, problem), answer, bench(problem), beside)
    text = page(shown)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail([f"{path} cannot be written: {error.strerror}"], FAILED)
    typer.echo(f"report: {path} ({len(text) / 1e6:.1f} MB)", err=True)
