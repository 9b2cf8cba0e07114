"""Builds the page's charts in reading order, among them those of load, latency and stages. Pure."""

import math
from collections.abc import Iterator, Sequence

import plotly.graph_objects as go

from cleave.planner.plan import Plan
from cleave.planner.result.text import milliseconds, number, percent, plan_label
from cleave.report.figures import Chart, Row, blank, rule
from cleave.report.load_study import Latencies, Study, Sweep, rivals
from cleave.report.tradeoffs import frontier, tradeoff
from cleave.simulator.latency_breakdown import Stage

_PLACES = (50, 90, 95, 99)
_MOST_LINES = 3
_STAGE_COLOURS = {
    Stage.PREFILL_QUEUE: "var(--prefill-wait)",
    Stage.PREFILL: "var(--prefill)",
    Stage.TRANSFER: "var(--transfer)",
    Stage.DECODE_QUEUE: "var(--decode-wait)",
    Stage.DECODE: "var(--decode)",
}
_SHOWN_LOADS = (0.25, 0.55, 0.8, 1.0, 1.2, 1.5)


def charts(study: Study) -> Iterator[Chart]:
    """All charts in reading order; those without data are left out."""
    if study.sweeps:
        yield attainment(study)
        yield cdf(study, "ttft")
        yield cdf(study, "tpot")
        yield stages(study)
        yield frontier(study)
        yield tradeoff(study, "ttft")
        yield tradeoff(study, "tpot")


def attainment(study: Study) -> Chart:
    """Attainment over rate with target, goodput and requested rate (DistServe, fig. 8)."""
    target, requested_rate = study.subject.slo.attainment, study.subject.rate
    sweeps = [_sweep_of(study, plan) for plan in _contenders(study)]
    figure = blank("rate (req/s)", "requests within the SLO")
    for position, sweep in enumerate(sweeps):
        color, dash = _line(sweep.plan, position)
        figure.add_scatter(
            x=list(sweep.rates),
            y=list(sweep.attainment),
            name=f"{plan_label(sweep.plan)} ({sweep.plan.gpus} GPUs)",
            mode="lines+markers",
            line={"color": color, "dash": dash, "width": 2.5},
            marker={"size": 5},
            hovertemplate="%{x:.3g} req/s: %{y:.1%}<extra></extra>",
        )
        if goodput := sweep.plan.prediction.goodput:
            figure.add_scatter(
                x=[goodput],
                y=[target],
                mode="markers",
                showlegend=False,
                marker={"size": 12, "symbol": "diamond", "color": color},
                hovertemplate="goodput %{x:.3g} req/s<extra></extra>",
            )
    rule(figure, y=target, text=f"target {percent(target)}")
    rule(figure, x=requested_rate, text=f"requested {number(requested_rate)} req/s")
    reach = max(
        *(1.6 * sweep.plan.prediction.goodput for sweep in sweeps),
        1.15 * requested_rate,
    )
    figure.update_xaxes(range=[0, reach])
    figure.update_yaxes(range=[0, 1.04], tickformat=".0%")
    sentences = [
        f"{plan_label(sweep.plan)} holds {percent(target)} up to "
        f"{number(sweep.plan.prediction.goodput)} req/s"
        for sweep in sweeps
    ]
    return Chart(
        "attainment",
        "How much load each plan carries",
        f"Share of requests within the SLO as the rate rises; {'; '.join(sentences)}.",
        figure,
        ("plan", "rate (req/s)", "attainment", "P90 TTFT", "P90 TPOT"),
        tuple(row for sweep in sweeps for row in _sweep_rows(sweep)),
    )


def cdf(study: Study, metric: str) -> Chart:
    """Distribution of one latency at the requested rate, with its target."""
    slo = study.subject.slo
    name, target = ("TTFT", slo.ttft_ms) if metric == "ttft" else ("TPOT", slo.tpot_ms)
    figure = blank(f"{name} (ms)", "share of requests")
    rows, sentences = [], []
    for position, latencies in enumerate(study.latencies):
        color, dash = _line(latencies.plan, position)
        values = getattr(latencies, f"{metric}_ms")
        share = _share_within(values, target)
        label = plan_label(latencies.plan)
        sentences.append(f"{label} meets {milliseconds(target)} for {percent(share)} of requests")
        rows += [
            (label, f"P{position}", milliseconds(_at(values, position))) for position in _PLACES
        ]
        figure.add_scatter(
            x=[value if math.isfinite(value) else None for value in values],
            y=[index / (len(values) - 1) for index in range(len(values))],
            name=label,
            mode="lines",
            line={"color": color, "dash": dash, "width": 2.5},
            hovertemplate="%{y:.1%} within %{x:.4g} ms<extra></extra>",
        )
    rule(figure, x=target, text=f"target {milliseconds(target)}")
    rule(figure, y=slo.attainment, text=f"target {percent(slo.attainment)}")
    _limit_tail(figure, study.latencies, metric, target)
    figure.update_yaxes(range=[0, 1.04], tickformat=".0%")
    return Chart(
        f"cdf-{metric}",
        f"{'Time to first token' if metric == 'ttft' else 'Time per output token'} ({name})",
        f"At {number(study.subject.rate)} req/s: {'; '.join(sentences)}.",
        figure,
        ("plan", "percentile", name),
        tuple(rows),
    )


def stages(study: Study) -> Chart:
    """Shares of the five stages as the load rises (DistServe, section 6.3)."""
    sweep = study.sweeps[0]
    bars = [
        (f"{number(sweep.rates[index])} req/s", sweep.stages[index])
        for index in _load_places(sweep, study.subject.rate)
    ]
    bars += [
        (f"{number(study.subject.rate)} req/s, {plan_label(other.plan)}", other.stages)
        for other in study.latencies[1:]
    ]
    figure = blank("share of all time", "")
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
    shares_at_rate = study.latencies[0].stages
    largest = max(shares_at_rate, key=lambda stage: shares_at_rate[stage])
    return Chart(
        "stages",
        "Where the time goes",
        f"{plan_label(sweep.plan)} as the rate rises. At the requested rate "
        f"{percent(shares_at_rate[largest])} of all time is {largest}, "
        f"{percent(shares_at_rate[Stage.TRANSFER])} is KV transfer.",
        figure,
        ("rate and plan", *map(str, Stage)),
        tuple((name, *(f"{shares[s]:.2%}" for s in Stage)) for name, shares in bars),
    )


def _at(values: Sequence[float], percentile: int) -> float:
    return values[round(percentile / 100 * (len(values) - 1))]


def _share_within(values: Sequence[float], target: float) -> float:
    return sum(value <= target for value in values) / len(values)


def _contenders(study: Study) -> list[Plan]:
    """The best plan of each kind, and the runner-up of either kind."""
    plans = [sweep.plan for sweep in study.sweeps]
    return list(dict.fromkeys((*rivals(plans), *plans[:2])))[:_MOST_LINES]


def _sweep_of(study: Study, plan: Plan) -> Sweep:
    return next(sweep for sweep in study.sweeps if sweep.plan is plan)


def _line(plan: Plan, position: int) -> tuple[str, str]:
    """Color by kind of plan, as for markers; the first line is solid, a third one grey."""
    if position == 2:
        return "var(--third)", "dot"
    kind = "var(--first)" if plan.is_disaggregated else "var(--second)"
    return kind, "dash" if position else "solid"


def _load_places(sweep: Sweep, requested_rate: float) -> list[int]:
    """Indices of selected rates from idle to overload."""
    base = sweep.plan.prediction.goodput or requested_rate
    return [
        min(range(len(sweep.rates)), key=lambda i: abs(sweep.rates[i] - load * base))
        for load in _SHOWN_LOADS
    ]


def _sweep_rows(sweep: Sweep) -> Iterator[Row]:
    for index, rate in enumerate(sweep.rates):
        yield (
            plan_label(sweep.plan),
            number(rate),
            percent(sweep.attainment[index]),
            milliseconds(sweep.ttft_p90_ms[index]),
            milliseconds(sweep.tpot_p90_ms[index]),
        )


def _limit_tail(
    figure: go.Figure, latencies: Sequence[Latencies], metric: str, target: float
) -> None:
    """End the axis at the tail of the better plan; that of the other may be far longer."""
    tails = [_at(getattr(each, f"{metric}_ms"), 99) for each in latencies]
    reach = min((tail for tail in tails if math.isfinite(tail)), default=target)
    figure.update_xaxes(range=[0, 1.25 * max(target, min(reach, 5 * target))])
