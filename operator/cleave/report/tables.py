"""Renders the page's tables and stat tiles as HTML. Pure."""

from collections.abc import Iterable, Sequence
from html import escape

from cleave.api.deployment import Slo
from cleave.planner.plan import Answer, NearestSlo, Percentiles, Plan
from cleave.planner.result.text import (
    milliseconds,
    number,
    percent,
    plan_label,
    power,
    trust_sentence,
)


def table(caption: str, heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column names its rows; cells are text."""
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in heading)
    body = "".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def plans(result: Answer, rate: float, neighbours: tuple[Plan, ...] = ()) -> str:
    """Predictions at the requested rate of every plan of the result, then of its neighbours."""
    heading = (
        *("plan", "kind", "GPUs", "goodput", "95 % interval", "per GPU", "attainment"),
        *("TTFT P50", "P90", "P99", "TPOT P50", "P90", "P99"),
        *("price/h", "power", "algorithm"),
    )
    listed = ((result.selected,) if result.selected else ()) + result.alternatives
    every = (*listed, *neighbours)
    caption = f"Predictions at {number(rate)} req/s; goodput in req/s"
    return table(caption, heading, (_plan_row(plan, result.selected) for plan in every))


def trust(result: Answer) -> str:
    """The sources of the plans' latency models, as a list."""
    every = ((result.selected,) if result.selected else ()) + result.alternatives
    sources: dict[str, list[str]] = {}
    for plan in every:
        sources.setdefault(trust_sentence(plan.prediction.trust), []).append(plan_label(plan))
    items = (
        f"<li>{escape(source)}{': ' + escape(', '.join(names)) if len(sources) > 1 else ''}</li>"
        for source, names in sources.items()
    )
    return f"<h3>Latency models</h3><ul>{''.join(items)}</ul>" if sources else ""


def tiles(plan: Plan, slo: Slo) -> str:
    """The most important figures of the selected plan, in large type."""
    prediction = plan.prediction
    low, high = prediction.goodput_interval
    figures = (
        (
            "goodput",
            f"{number(prediction.goodput)} req/s",
            f"95 %: {number(low)} to {number(high)}",
            "",
        ),
        ("per GPU", f"{number(plan.goodput_per_gpu)} req/s", f"{plan.gpus} GPUs", ""),
        (
            "attainment",
            percent(prediction.attainment),
            f"target {percent(slo.attainment)}",
            _met(prediction.attainment >= slo.attainment),
        ),
        ("P90 TTFT", *_against(prediction.ttft_ms, slo.ttft_ms)),
        ("P90 TPOT", *_against(prediction.tpot_ms, slo.tpot_ms)),
        ("price", number(prediction.cost_per_hour), "per hour", ""),
        ("power", power(prediction.power_watts), "provisioned", ""),
    )
    return "".join(_tile(*figure) for figure in figures)


def nearest(slo: NearestSlo) -> str:
    """The nearest feasible SLO, in large type."""
    times = f"{number(slo.scale)} times the requested one"
    figures = (
        ("TTFT that holds", milliseconds(slo.ttft_ms), times),
        ("TPOT that holds", milliseconds(slo.tpot_ms), times),
    )
    tiles = "".join(_tile(*figure, "") for figure in figures)
    return f'{tiles}<div class="tile wide"><dt>with</dt><dd>{escape(slo.plan)}</dd></div>'


def _tile(name: str, value: str, detail: str, state: str) -> str:
    return (
        f'<div class="tile {state}"><dt>{name}</dt><dd>{escape(value)}'
        f"<small>{escape(detail)}</small></dd></div>"
    )


def _against(latency: Percentiles, target: float) -> tuple[str, str, str]:
    return milliseconds(latency.p90), f"target {milliseconds(target)}", _met(latency.p90 <= target)


def _met(holds: bool) -> str:
    return "good" if holds else "bad"


def _plan_row(plan: Plan, selected: Plan | None) -> tuple[str, ...]:
    prediction = plan.prediction
    return (
        plan_label(plan) + (" (selected)" if plan is selected else ""),
        "disaggregated" if plan.is_disaggregated else "colocated",
        str(plan.gpus),
        number(prediction.goodput),
        f"{number(prediction.goodput_interval[0])} to {number(prediction.goodput_interval[1])}",
        number(plan.goodput_per_gpu),
        percent(prediction.attainment),
        *_percentiles(prediction.ttft_ms),
        *_percentiles(prediction.tpot_ms),
        number(prediction.cost_per_hour),
        power(prediction.power_watts),
        plan.algorithm,
    )


def _percentiles(latency: Percentiles) -> tuple[str, str, str]:
    return milliseconds(latency.p50), milliseconds(latency.p90), milliseconds(latency.p99)
