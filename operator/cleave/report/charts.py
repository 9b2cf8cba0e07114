"""The page's charts: Plotly figures, each with its words and its numbers.

Pure. Colours are CSS variables (`var(--prefill)`): the page puts in those of the reader's theme.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from cleave.planner.plan import Plan
from cleave.planner.words import milliseconds, number, percent, plan_label
from cleave.report.study import Latencies, Study, Sweep, rivals
from cleave.simulator.breakdown import Stage

Row = tuple[str, ...]
_MOST_LINES = 3
_STAGE_COLOURS = {
    Stage.PREFILL_QUEUE: "var(--prefill-wait)",
    Stage.PREFILL: "var(--prefill)",
    Stage.TRANSFER: "var(--transfer)",
    Stage.DECODE_QUEUE: "var(--decode-wait)",
    Stage.DECODE: "var(--decode)",
}
_SHOWN_LOADS = (0.25, 0.55, 0.8, 1.0, 1.2, 1.5)
_LOG_SPAN = 30.0
"""Largest over smallest value from which an axis is logarithmic."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure with all that stands around it."""

    key: str
    title: str
    note: str
    """What is seen, in a sentence; read aloud instead of the picture."""
    figure: go.Figure
    heading: Row
    rows: tuple[Row, ...]
    """The same numbers as a table."""


def charts(study: Study) -> Iterator[Chart]:
    """All of them, in reading order; those without data are left out."""
    if study.sweeps:
        yield attainment(study)
        yield cdf(study, "ttft")
        yield cdf(study, "tpot")
        yield stages(study)
        yield frontier(study)
        yield tradeoff(study, "ttft")
        yield tradeoff(study, "tpot")


def attainment(study: Study) -> Chart:
    """Attainment against rate with the goal, the goodput and the asked rate (DistServe, fig. 8)."""
    goal, asked = study.subject.slo.attainment, study.subject.rate
    shown = [_sweep_of(study, plan) for plan in _contenders(study)]
    figure = _figure("rate (req/s)", "requests within the SLO")
    for place, sweep in enumerate(shown):
        colour, dash = _line(sweep.plan, place)
        figure.add_scatter(
            x=list(sweep.rates),
            y=list(sweep.attainment),
            name=f"{plan_label(sweep.plan)} ({sweep.plan.gpus} GPUs)",
            mode="lines+markers",
            line={"color": colour, "dash": dash, "width": 2.5},
            marker={"size": 5},
            hovertemplate="%{x:.3g} req/s: %{y:.1%}<extra></extra>",
        )
        if most := sweep.plan.prediction.goodput:
            figure.add_scatter(
                x=[most],
                y=[goal],
                mode="markers",
                showlegend=False,
                marker={"size": 12, "symbol": "diamond", "color": colour},
                hovertemplate="goodput %{x:.3g} req/s<extra></extra>",
            )
    _rule(figure, y=goal, text=f"goal {percent(goal)}")
    _rule(figure, x=asked, text=f"asked {number(asked)} req/s")
    reach = max(
        *(1.6 * sweep.plan.prediction.goodput for sweep in shown),
        1.15 * asked,
    )
    figure.update_xaxes(range=[0, reach])
    figure.update_yaxes(range=[0, 1.04], tickformat=".0%")
    sentences = [
        f"{plan_label(sweep.plan)} holds {percent(goal)} up to "
        f"{number(sweep.plan.prediction.goodput)} req/s"
        for sweep in shown
    ]
    return Chart(
        "attainment",
        "How much load each plan carries",
        f"Share of requests within the SLO as the rate rises; {'; '.join(sentences)}.",
        figure,
        ("plan", "rate (req/s)", "attainment", "P90 TTFT", "P90 TPOT"),
        tuple(row for sweep in shown for row in _sweep_rows(sweep)),
    )


def cdf(study: Study, metric: str) -> Chart:
    """Distribution of one latency at the asked rate, with its target."""
    slo = study.subject.slo
    name, target = ("TTFT", slo.ttft_ms) if metric == "ttft" else ("TPOT", slo.tpot_ms)
    figure = _figure(f"{name} (ms)", "share of requests")
    rows, seen = [], []
    for place, latencies in enumerate(study.latencies):
        colour, dash = _line(latencies.plan, place)
        values = getattr(latencies, f"{metric}_ms")
        share = _share_within(values, target)
        label = plan_label(latencies.plan)
        seen.append(f"{label} meets {milliseconds(target)} for {percent(share)} of requests")
        rows += [(label, f"P{place}", milliseconds(_at(values, place))) for place in _PLACES]
        figure.add_scatter(
            x=[value if math.isfinite(value) else None for value in values],
            y=[index / (len(values) - 1) for index in range(len(values))],
            name=label,
            mode="lines",
            line={"color": colour, "dash": dash, "width": 2.5},
            hovertemplate="%{y:.1%} within %{x:.4g} ms<extra></extra>",
        )
    _rule(figure, x=target, text=f"target {milliseconds(target)}")
    _rule(figure, y=slo.attainment, text=f"goal {percent(slo.attainment)}")
    _limit_tail(figure, study.latencies, metric, target)
    figure.update_yaxes(range=[0, 1.04], tickformat=".0%")
    return Chart(
        f"cdf-{metric}",
        f"{'Time to first token' if metric == 'ttft' else 'Time per output token'} ({name})",
        f"At {number(study.subject.rate)} req/s: {'; '.join(seen)}.",
        figure,
        ("plan", "percentile", name),
        tuple(rows),
    )


def stages(study: Study) -> Chart:
    """Shares of the five stages as the load rises (DistServe, section 6.3)."""
    sweep = study.sweeps[0]
    bars = [
        (f"{number(sweep.rates[place])} req/s", sweep.stages[place])
        for place in _load_places(sweep, study.subject.rate)
    ]
    bars += [
        (f"{number(study.subject.rate)} req/s, {plan_label(other.plan)}", other.stages)
        for other in study.latencies[1:]
    ]
    figure = _figure("share of all time", "")
    for stage in Stage:
        figure.add_bar(
            y=[name for name, _ in bars],
            x=[shares[stage] for _, shares in bars],
            name=str(stage),
            orientation="h",
            marker={"color": _STAGE_COLOURS[stage], "line": {"width": 0}},
            hovertemplate="%{y}<br>" + str(stage) + ": %{x:.2%}<extra></extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.35, height=360, legend={"traceorder": "normal"})
    figure.update_xaxes(tickformat=".0%", range=[0, 1])
    figure.update_yaxes(autorange="reversed", automargin=True, showgrid=False)
    asked = study.latencies[0].stages
    largest = max(asked, key=lambda stage: asked[stage])
    return Chart(
        "stages",
        "Where the time goes",
        f"{plan_label(sweep.plan)} as the rate rises. At the asked rate {percent(asked[largest])} "
        f"of all time is {largest}, {percent(asked[Stage.TRANSFER])} is KV transfer.",
        figure,
        ("rate and plan", *map(str, Stage)),
        tuple((name, *(f"{shares[s]:.2%}" for s in Stage)) for name, shares in bars),
    )


def frontier(study: Study) -> Chart:
    """Cost (GPUs where nothing has a price) against goodput."""
    plans = _every(study)
    priced = all(plan.prediction.cost_per_hour > 0 for plan in plans)
    axis = "price per hour" if priced else "GPUs"
    figure = _figure(axis, "goodput (req/s)")
    spent = [plan.prediction.cost_per_hour if priced else float(plan.gpus) for plan in plans]
    edge = pareto([(x, plan.prediction.goodput) for x, plan in zip(spent, plans, strict=True)])
    figure.add_scatter(
        x=[spent[i] for i in edge],
        y=[plans[i].prediction.goodput for i in edge],
        name="frontier",
        mode="lines",
        line={"color": "var(--muted)", "width": 1.5, "dash": "dot", "shape": "hv"},
        hoverinfo="skip",
    )
    _add_plans(figure, study, spent, [plan.prediction.goodput for plan in plans])
    figure.update_xaxes(rangemode="tozero")
    figure.update_yaxes(rangemode="tozero")
    best = ", ".join(plan_label(plans[i]) for i in edge)
    hollow = " Hollow: some instances more or less." if study.neighbours else ""
    return Chart(
        "frontier",
        f"Goodput against {'price' if priced else 'GPUs'}",
        f"No plan has more goodput for less than those on the frontier: {best}.{hollow}",
        figure,
        ("plan", axis, "goodput (req/s)"),
        tuple(
            (plan_label(plan), number(x), number(plan.prediction.goodput))
            for plan, x in zip(plans, spent, strict=True)
        ),
    )


def tradeoff(study: Study, metric: str) -> Chart:
    """P90 latency against goodput per cost, the SLO's side shaded (Vidur, figure 5)."""
    plans, slo = _every(study), study.subject.slo
    name, target = ("TTFT", slo.ttft_ms) if metric == "ttft" else ("TPOT", slo.tpot_ms)
    late = [getattr(plan.prediction, f"{metric}_ms").p90 for plan in plans]
    priced = all(plan.prediction.cost_per_hour > 0 for plan in plans)
    by = [plan.prediction.cost_per_hour if priced else plan.gpus for plan in plans]
    worth = [plan.prediction.goodput / each for plan, each in zip(plans, by, strict=True)]
    unit = "goodput per price of an hour" if priced else "goodput per GPU (req/s)"
    figure = _figure(f"P90 {name} (ms)", unit)
    _add_plans(figure, study, late, worth)
    finite = [value for value in late if math.isfinite(value) and value > 0]
    _scale(figure, [*finite, target])
    figure.add_vrect(x0=0.001, x1=target, fillcolor="var(--good-area)", line_width=0, layer="below")
    _rule(figure, x=target, text=f"target {milliseconds(target)}")
    figure.update_yaxes(rangemode="tozero")
    within = sum(value <= target for value in late)
    return Chart(
        f"tradeoff-{metric}",
        f"Goodput per {'price' if priced else 'GPU'} against {name}",
        f"At {number(study.subject.rate)} req/s {within} of {len(plans)} plans have their P90 "
        f"{name} within {milliseconds(target)}, the shaded side.",
        figure,
        ("plan", f"P90 {name}", unit),
        tuple(
            (plan_label(plan), milliseconds(x), number(y))
            for plan, x, y in zip(plans, late, worth, strict=True)
        ),
    )


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Places of the points that no other beats: none costs less and brings as much."""
    order = sorted(range(len(points)), key=lambda place: (points[place][0], -points[place][1]))
    kept: list[int] = []
    for place in order:
        if not kept or points[place][1] > points[kept[-1]][1]:
            kept.append(place)
    return kept


_PLACES = (50, 90, 95, 99)


def _at(values: Sequence[float], percentile: int) -> float:
    return values[round(percentile / 100 * (len(values) - 1))]


def _share_within(values: Sequence[float], target: float) -> float:
    return sum(value <= target for value in values) / len(values)


def _every(study: Study) -> tuple[Plan, ...]:
    answer = study.answer
    listed = ((answer.selected,) if answer.selected else ()) + answer.alternatives
    return (*listed, *study.neighbours)


def _contenders(study: Study) -> list[Plan]:
    """The best of each kind, and the runner-up whatever it is."""
    plans = [sweep.plan for sweep in study.sweeps]
    return list(dict.fromkeys((*rivals(plans), *plans[:2])))[:_MOST_LINES]


def _sweep_of(study: Study, plan: Plan) -> Sweep:
    return next(sweep for sweep in study.sweeps if sweep.plan is plan)


def _line(plan: Plan, place: int) -> tuple[str, str]:
    """Colour by kind of plan, as for markers; the first line is solid, a third one grey."""
    if place == 2:
        return "var(--third)", "dot"
    kind = "var(--first)" if plan.is_disaggregated else "var(--second)"
    return kind, "dash" if place else "solid"


def _load_places(sweep: Sweep, asked: float) -> list[int]:
    """Places of some rates from idle to overload, all bars apart."""
    base = sweep.plan.prediction.goodput or asked
    return [
        min(range(len(sweep.rates)), key=lambda i: abs(sweep.rates[i] - load * base))
        for load in _SHOWN_LOADS
    ]


def _sweep_rows(sweep: Sweep) -> Iterator[Row]:
    for place, rate in enumerate(sweep.rates):
        yield (
            plan_label(sweep.plan),
            number(rate),
            percent(sweep.attainment[place]),
            milliseconds(sweep.ttft_p90_ms[place]),
            milliseconds(sweep.tpot_p90_ms[place]),
        )


def _add_plans(figure: go.Figure, study: Study, x: Sequence[float], y: Sequence[float]) -> None:
    """One marker per plan: shape and colour say the kind, a ring the selected one.

    Neighbours of the answer's plans are hollow.
    """
    plans = _every(study)
    for kind, colour, symbol in (
        ("disaggregated", "var(--first)", "circle"),
        ("colocated", "var(--second)", "square"),
    ):
        places = [
            i
            for i, plan in enumerate(plans)
            if plan.is_disaggregated == (kind == "disaggregated") and math.isfinite(x[i])
        ]
        hollow = [plans[i] in study.neighbours for i in places]
        figure.add_scatter(
            x=[x[i] for i in places],
            y=[y[i] for i in places],
            name=kind,
            mode="markers",
            marker={
                "size": [9 if each else 12 for each in hollow],
                "color": colour,
                "opacity": 1,
                "symbol": [f"{symbol}-open" if each else symbol for each in hollow],
            },
            text=[plan_label(plans[i]) for i in places],
            hovertemplate="%{text}<br>%{x:.4g}, %{y:.3g}<extra></extra>",
        )
    if study.answer.selected and math.isfinite(x[0]):
        figure.add_scatter(
            x=[x[0]],
            y=[y[0]],
            name="selected",
            mode="markers",
            marker={
                "size": 21,
                "symbol": "circle-open",
                "color": "var(--ink)",
                "line": {"width": 2},
            },
            hoverinfo="skip",
        )


def _limit_tail(figure: go.Figure, found: Sequence[Latencies], metric: str, target: float) -> None:
    """Ends the axis where the tail of the better plan ends; the other one's may be far away."""
    tails = [_at(getattr(each, f"{metric}_ms"), 99) for each in found]
    reach = min((tail for tail in tails if math.isfinite(tail)), default=target)
    figure.update_xaxes(range=[0, 1.25 * max(target, min(reach, 5 * target))])


def _scale(figure: go.Figure, values: Sequence[float]) -> None:
    low, high = min(values), max(values)
    if high > _LOG_SPAN * low:
        figure.update_xaxes(
            type="log", range=[math.log10(low / 1.6), math.log10(high * 1.6)], dtick=1
        )
    else:
        figure.update_xaxes(range=[0, high * 1.12])


def _rule(figure: go.Figure, *, text: str, x: float | None = None, y: float | None = None) -> None:
    """A thin line across the plot with its meaning written at it."""
    line = {"line": {"color": "var(--rule)", "width": 1.25, "dash": "dash"}, "layer": "below"}
    words = {
        "text": text,
        "showarrow": False,
        "font": {"size": 11, "color": "var(--muted)"},
        "bgcolor": "var(--card)",
        "borderpad": 2,
    }
    if x is not None:
        figure.add_vline(x=x, **line)
        figure.add_annotation(
            x=math.log10(x) if figure.layout.xaxis.type == "log" else x,
            y=1,
            yref="paper",
            yanchor="bottom",
            **words,
        )
    else:
        figure.add_hline(y=y, **line)
        figure.add_annotation(x=0, xref="paper", xanchor="left", y=y, **words)


def _figure(x: str, y: str) -> go.Figure:
    axis: dict[str, Any] = {
        "gridcolor": "var(--grid)",
        "linecolor": "var(--grid)",
        "zeroline": False,
        "automargin": True,
        "title": {"standoff": 8},
    }
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=320,
        margin={"l": 48, "r": 16, "t": 34, "b": 44},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12, "color": "var(--ink)"},
        legend={"orientation": "h", "y": -0.24, "yanchor": "top", "x": 0, "xanchor": "left"},
        hoverlabel={"bgcolor": "var(--card)", "font": {"color": "var(--ink)"}},
        xaxis={**axis, "title": {"text": x, "standoff": 8}},
        yaxis={**axis, "title": {"text": y, "standoff": 8}},
    )
    return figure
