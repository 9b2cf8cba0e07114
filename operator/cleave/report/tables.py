"""Renders the page's tables and stat tiles as HTML. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from html import escape

from cleave.api.deployment import Slo
from cleave.planner.plan import NearestSlo, Plan, PlanningResult
from cleave.planner.result.text import (
    describe_trust,
    format_attainment,
    format_ms,
    format_number,
    format_percent,
    format_plan,
    format_power,
)


def render_table(caption: str, heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
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


def render_plans(result: PlanningResult, rate: float, neighbours: tuple[Plan, ...] = ()) -> str:
    """Predictions at the requested rate of every plan of the result, then of its neighbours."""
    heading = (
        *("plan", "kind", "GPUs", "goodput", "95 % interval", "per GPU", "attainment"),
        *("TTFT P50", "P90", "P99", "TPOT P50", "P90", "P99", "ITL P50", "P90", "P99"),
        *("USD/h", "power", "algorithm"),
    )
    rows = (_build_plan_row(plan, result.selected) for plan in (*result.plans, *neighbours))
    caption = f"Predictions at {format_number(rate)} req/s; goodput in req/s"
    return render_table(caption, heading, rows)


def render_trust(result: PlanningResult) -> str:
    """The sources of the plans' latency models, as a list."""
    sources: dict[str, list[str]] = {}
    for plan in result.plans:
        sources.setdefault(describe_trust(plan.prediction.trust), []).append(format_plan(plan))
    items = (
        f"<li>{escape(source)}{': ' + escape(', '.join(names)) if len(sources) > 1 else ''}</li>"
        for source, names in sources.items()
    )
    return f"<h3>Latency models</h3><ul>{''.join(items)}</ul>" if sources else ""


def render_tiles(plan: Plan, slo: Slo) -> str:
    """The most important figures of the selected plan, in large type."""
    prediction = plan.prediction
    low, high = prediction.goodput_interval
    interval = f"95 %: {format_number(low)} to {format_number(high)}"
    text = f"target {format_percent(slo.attainment)}"
    attains = prediction.attainment >= slo.attainment
    tiles = (
        _render_tile("goodput", f"{format_number(prediction.goodput)} req/s", interval),
        _render_tile(
            "per GPU", f"{format_number(plan.goodput_per_gpu)} req/s", f"{plan.gpus} GPUs"
        ),
        _render_tile("attainment", format_attainment(prediction), text, holds=attains),
        _render_share_tile("by TTFT", prediction.ttft_attainment, slo.ttft_attainment),
        _render_share_tile("by TPOT", prediction.tpot_attainment, slo.tpot_attainment),
        _render_latency_tile("P90 TTFT", prediction.ttft_ms.p90, slo.ttft_ms),
        _render_latency_tile("P90 TPOT", prediction.tpot_ms.p90, slo.tpot_ms),
        _render_latency_tile("P99 ITL", prediction.itl_ms.p99, slo.itl_p99_ms),
        _render_tile("price", format_number(prediction.cost_per_hour), "US dollars per hour"),
        _render_tile("power", format_power(prediction.power_watts), "provisioned"),
    )
    return "".join(tiles)


def render_nearest_slo(nearest: NearestSlo, slo: Slo) -> str:
    """The nearest feasible SLO, in large type."""
    tiles = "".join(
        _render_tile(f"{name} that holds", format_ms(value), f"requested {format_ms(requested)}")
        for name, value, requested in (
            ("TTFT", nearest.ttft_ms, slo.ttft_ms),
            ("TPOT", nearest.tpot_ms, slo.tpot_ms),
            ("ITL P99", nearest.itl_p99_ms, slo.itl_p99_ms),
        )
        if value is not None and requested is not None
    )
    return f'{tiles}<div class="tile wide"><dt>with</dt><dd>{escape(nearest.plan)}</dd></div>'


def _render_tile(name: str, value: str, detail: str, *, holds: bool | None = None) -> str:
    state = {None: "", True: "good", False: "bad"}[holds]
    return (
        f'<div class="tile {state}"><dt>{name}</dt><dd>{escape(value)}'
        f"<small>{escape(detail)}</small></dd></div>"
    )


def _render_latency_tile(name: str, ms: float, target: float | None) -> str:
    text = "no target" if target is None else f"target {format_ms(target)}"
    return _render_tile(name, format_ms(ms), text, holds=None if target is None else ms <= target)


def _render_share_tile(name: str, share: float, target: float | None) -> str:
    """Empty without a target of its own."""
    if target is None:
        return ""
    text = f"target {format_percent(target)}"
    return _render_tile(name, format_percent(share), text, holds=share >= target)


def _build_plan_row(plan: Plan, selected: Plan | None) -> tuple[str, ...]:
    prediction = plan.prediction
    return (
        format_plan(plan) + (" (selected)" if plan is selected else ""),
        "disaggregated" if plan.is_disaggregated else "colocated",
        str(plan.gpus),
        format_number(prediction.goodput),
        " to ".join(format_number(end) for end in prediction.goodput_interval),
        format_number(plan.goodput_per_gpu),
        format_attainment(prediction),
        *map(format_ms, astuple(prediction.ttft_ms)),
        *map(format_ms, astuple(prediction.tpot_ms)),
        *map(format_ms, astuple(prediction.itl_ms)),
        format_number(prediction.cost_per_hour),
        format_power(prediction.power_watts),
        plan.algorithm,
    )
