"""The planner's result on a terminal: the verdict, ranked plans, and warnings."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cleave.cli.output.tables import build_plain_table, print_full_width, print_line
from cleave.perf.hardware.gpu import PRICE_SOURCE
from cleave.planner.plan import Percentiles, Plan, PlanningResult, PlanVerdict
from cleave.planner.result.text import (
    VERDICT_TEXTS,
    describe_pool,
    describe_trust,
    format_attainment,
    format_number,
    format_plan,
    format_power,
    strip_verdict,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_STYLES = {
    PlanVerdict.DISAGGREGATE: "bold green",
    PlanVerdict.COLOCATE: "bold magenta",
    PlanVerdict.INFEASIBLE: "bold red",
}


def show(console: "Console", result: PlanningResult, *, top: int, wide: bool) -> None:
    """Print verdict, reason, table, runner-up and warnings; cells are never truncated."""
    from rich.text import Text

    verdict = Text.assemble((VERDICT_TEXTS[result.verdict], _STYLES[result.verdict]))
    if result.selected:
        verdict.append(f": {' and '.join(describe_pool(pool) for pool in result.selected.pools)}")
        console.print(verdict, soft_wrap=True)
        print_line(console, strip_verdict(result))
    else:
        verdict.append(f": {strip_verdict(result)}", style="not bold default")
        console.print(verdict, soft_wrap=True)
    if plans := result.plans[:top]:
        print_full_width(console, build_table(plans, result.selected, wide=wide))
        for line in _list_footnotes(plans, wide=wide):
            print_line(console, line)
    print_line(console, result.what_would_change)
    if result.reuse:
        print_line(console, result.reuse.text)
    for warning in result.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)


def build_table(plans: Sequence[Plan], selected: Plan | None, *, wide: bool) -> "Table":
    """One row per plan; goodput in req/s, TTFT, TPOT and ITL as P50/P90/P99 in ms."""
    figures = ("GPUS", "GOODPUT", "PER GPU", "ATTAINED", "TTFT MS", "TPOT MS", "ITL MS", "USD/H")
    table = build_plain_table(("PLAN",), (*figures, *(("POWER", "95 %", "LIMITS") if wide else ())))
    for heading in ("FOUND BY", "TRUST") if wide else ("TRUST",):
        table.add_column(heading, no_wrap=True)
    for plan in plans:
        style = "bold" if plan is selected else None
        table.add_row(*_format_cells(plan, selected, wide=wide), style=style)
    return table


def _format_cells(plan: Plan, selected: Plan | None, *, wide: bool) -> Iterator[str]:
    prediction = plan.prediction
    cells = " in cells" if any(pool.per_cell for pool in plan.pools) else ""
    yield f"{'*' if plan is selected else ' '} {format_plan(plan)}{cells}"
    yield str(plan.gpus)
    yield format_number(prediction.goodput)
    yield format_number(plan.goodput_per_gpu)
    yield format_attainment(prediction)
    yield _format_percentiles(prediction.ttft_ms)
    yield _format_percentiles(prediction.tpot_ms)
    yield _format_percentiles(prediction.itl_ms)
    yield format_number(prediction.cost_per_hour)
    if wide:
        yield format_power(prediction.power_watts)
        yield "{}-{}".format(*map(format_number, prediction.goodput_interval))
        limits = (f"{p.max_num_seqs or '-'}/{p.max_num_batched_tokens or '-'}" for p in plan.pools)
        yield " ".join(limits)
        yield plan.algorithm
    yield f"{prediction.trust.kind}"


def _list_footnotes(plans: Sequence[Plan], *, wide: bool) -> Iterator[str]:
    """What holds for several rows: the sources of times and prices."""
    texts = (describe_trust(plan.prediction.trust, is_short=not wide) for plan in plans)
    for text in dict.fromkeys(texts):
        yield f"TRUST: {text}"
    if any(plan.prediction.cost_per_hour > 0 for plan in plans):
        yield f"USD/H: {PRICE_SOURCE}; pricePerHour under spec.planning.gpus sets yours"


def _format_percentiles(latency: Percentiles) -> str:
    return "/".join(format_number(value) for value in (latency.p50, latency.p90, latency.p99))
