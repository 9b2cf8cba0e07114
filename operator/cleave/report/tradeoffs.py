"""Builds the charts that compare plans: goodput against cost and against latency.

Pure. Plans of the result have filled markers, their neighbours hollow ones.
"""

import math
from collections.abc import Sequence

import plotly.graph_objects as go

from cleave.planner.result.text import format_ms, format_number, format_plan
from cleave.report.figures import Chart, add_rule, create_figure
from cleave.report.load_study import LoadStudy

_LOG_SPAN = 30.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""


def build_frontier_chart(study: LoadStudy) -> Chart:
    """Goodput against cost (GPUs where prices are missing)."""
    plans = (*study.result.plans, *study.neighbours)
    priced = all(plan.prediction.cost_per_hour > 0 for plan in plans)
    axis = "US dollars per hour" if priced else "GPUs"
    figure = create_figure(axis, "goodput (req/s)")
    costs = [plan.prediction.cost_per_hour if priced else float(plan.gpus) for plan in plans]
    goodputs = [plan.prediction.goodput for plan in plans]
    edge = find_pareto_front(list(zip(costs, goodputs, strict=True)))
    figure.add_scatter(
        x=[costs[i] for i in edge],
        y=[goodputs[i] for i in edge],
        name="frontier",
        mode="lines",
        line={"color": "var(--muted)", "width": 1.5, "dash": "dot", "shape": "hv"},
        hoverinfo="skip",
    )
    _add_plans(figure, study, costs, goodputs)
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    best = ", ".join(format_plan(plans[i]) for i in edge)
    hollow = " Hollow: some instances more or less." if study.neighbours else ""
    return Chart(
        "frontier",
        f"Goodput against {'price' if priced else 'GPUs'}",
        f"No plan has more goodput for less than those on the frontier: {best}.{hollow}",
        figure,
        ("plan", axis, "goodput (req/s)"),
        tuple(
            (format_plan(plan), format_number(x), format_number(y))
            for plan, x, y in zip(plans, costs, goodputs, strict=True)
        ),
    )


def build_tradeoff_chart(study: LoadStudy, metric: str) -> Chart:
    """P90 latency against goodput per cost, with the SLO's side shaded (Vidur, figure 5)."""
    plans, slo = (*study.result.plans, *study.neighbours), study.report_input.slo
    name, target = ("TTFT", slo.ttft_ms) if metric == "ttft" else ("TPOT", slo.tpot_ms)
    latencies = [getattr(plan.prediction, f"{metric}_ms").p90 for plan in plans]
    priced = all(plan.prediction.cost_per_hour > 0 for plan in plans)
    by = [plan.prediction.cost_per_hour if priced else plan.gpus for plan in plans]
    efficiencies = [plan.prediction.goodput / each for plan, each in zip(plans, by, strict=True)]
    unit = "goodput per price of an hour" if priced else "goodput per GPU (req/s)"
    figure = create_figure(f"P90 {name} (ms)", unit)
    _add_plans(figure, study, latencies, efficiencies)
    finite = [value for value in latencies if math.isfinite(value) and value > 0]
    _scale_axis(figure, [*finite, target])
    figure.add_vrect(x0=0.001, x1=target, fillcolor="var(--good-area)", line_width=0, layer="below")
    add_rule(figure, x=target, text=f"target {format_ms(target)}")
    figure.update_yaxes(rangemode="tozero")
    within = sum(value <= target for value in latencies)
    return Chart(
        f"tradeoff-{metric}",
        f"Goodput per {'price' if priced else 'GPU'} against {name}",
        f"At {format_number(study.report_input.rate)} req/s {within} of {len(plans)} plans have "
        f"their P90 {name} within {format_ms(target)}, the shaded side.",
        figure,
        ("plan", f"P90 {name}", unit),
        tuple(
            (format_plan(plan), format_ms(x), format_number(y))
            for plan, x, y in zip(plans, latencies, efficiencies, strict=True)
        ),
    )


def find_pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other point dominates by lower cost and no less value."""
    order = sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1]))
    front: list[int] = []
    for index in order:
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def _add_plans(figure: go.Figure, study: LoadStudy, x: Sequence[float], y: Sequence[float]) -> None:
    """A marker per plan: shape and color by kind, a ring if selected, hollow if a neighbour."""
    plans = (*study.result.plans, *study.neighbours)
    for kind, color, symbol in (
        ("disaggregated", "var(--first)", "circle"),
        ("colocated", "var(--second)", "square"),
    ):
        is_kind = [plan.is_disaggregated == (kind == "disaggregated") for plan in plans]
        indices = [i for i in range(len(plans)) if is_kind[i] and math.isfinite(x[i])]
        hollow = [plans[i] in study.neighbours for i in indices]
        figure.add_scatter(
            x=[x[i] for i in indices],
            y=[y[i] for i in indices],
            name=kind,
            mode="markers",
            marker={
                "size": [9 if each else 12 for each in hollow],
                "color": color,
                "opacity": 1,
                "symbol": [f"{symbol}-open" if each else symbol for each in hollow],
            },
            text=[format_plan(plans[i]) for i in indices],
            hovertemplate="%{text}<br>%{x:.4g}, %{y:.3g}<extra></extra>",
        )
    if study.result.selected and math.isfinite(x[0]):
        ring = {"size": 21, "symbol": "circle-open", "color": "var(--ink)", "line": {"width": 2}}
        figure.add_scatter(
            x=[x[0]], y=[y[0]], name="selected", mode="markers", marker=ring, hoverinfo="skip"
        )


def _scale_axis(figure: go.Figure, values: Sequence[float]) -> None:
    low, high = min(values), max(values)
    if high > _LOG_SPAN * low:
        ends = [math.log10(low / 1.6), math.log10(high * 1.6)]
        figure.update_xaxes(type="log", range=ends, dtick=1)
    else:
        figure.update_xaxes(range=[0, high * 1.12])
