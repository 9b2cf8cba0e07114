"""The planner's result on a terminal: the verdict, ranked plans, and warnings."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cleave.cli.output.tables import plain_table, print_whole
from cleave.planner.plan import Answer, Percentiles, Plan, Verdict
from cleave.planner.result.text import (
    VERDICTS,
    number,
    percent,
    plan_label,
    pool_sentence,
    power,
    reason_alone,
    trust_sentence,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_STYLES = {
    Verdict.DISAGGREGATE: "bold green",
    Verdict.COLOCATE: "bold magenta",
    Verdict.INFEASIBLE: "bold red",
}


def show(console: "Console", answer: Answer, *, top: int, wide: bool) -> None:
    """Print verdict, reason, table, runner-up and warnings; cells are never truncated."""
    from rich.text import Text

    verdict = Text.assemble((VERDICTS[answer.verdict], _STYLES[answer.verdict]))
    if answer.selected:
        pools = " and ".join(pool_sentence(pool) for pool in answer.selected.pools)
        verdict.append(f": {pools}")
        console.print(verdict, soft_wrap=True)
        console.print(reason_alone(answer), markup=False, highlight=False, soft_wrap=True)
    else:
        verdict.append(f": {reason_alone(answer)}", style="not bold default")
        console.print(verdict, soft_wrap=True)
    if plans := ranked(answer)[:top]:
        print_whole(console, table(plans, answer.selected, wide=wide))
    console.print(answer.what_would_change, markup=False, highlight=False, soft_wrap=True)
    for warning in answer.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)


def ranked(answer: Answer) -> tuple[Plan, ...]:
    """All plans of the result, best first."""
    return ((answer.selected,) if answer.selected else ()) + answer.alternatives


def table(plans: Sequence[Plan], selected: Plan | None, *, wide: bool) -> "Table":
    """One row per plan; goodput in req/s, TTFT and TPOT as P50/P90/P99 in ms."""
    figures = ("GPUS", "GOODPUT", "PER GPU", "ATTAINED", "TTFT MS", "TPOT MS", "PRICE/H")
    drawn = plain_table(("PLAN",), (*figures, *(("POWER", "95 %", "LIMITS") if wide else ())))
    for heading in ("FOUND BY", "TRUST") if wide else ("TRUST",):
        drawn.add_column(heading, no_wrap=True)
    for plan in plans:
        style = "bold" if plan is selected else None
        drawn.add_row(*_cells(plan, selected, wide=wide), style=style)
    return drawn


def _cells(plan: Plan, selected: Plan | None, *, wide: bool) -> Iterator[str]:
    prediction = plan.prediction
    yield f"{'*' if plan is selected else ' '} {plan_label(plan)}"
    yield str(plan.gpus)
    yield number(prediction.goodput)
    yield number(plan.goodput_per_gpu)
    yield percent(prediction.attainment)
    yield _percentiles(prediction.ttft_ms)
    yield _percentiles(prediction.tpot_ms)
    yield number(prediction.cost_per_hour)
    if wide:
        yield power(prediction.power_watts)
        yield "{}-{}".format(*map(number, prediction.goodput_interval))
        limits = [f"{p.max_num_seqs or '-'}/{p.max_num_batched_tokens or '-'}" for p in plan.pools]
        yield " ".join(limits)
        yield plan.algorithm
        yield trust_sentence(prediction.trust)
    else:
        yield f"{prediction.trust.basis}"


def _percentiles(latency: Percentiles) -> str:
    return "/".join(number(value) for value in (latency.p50, latency.p90, latency.p99))
