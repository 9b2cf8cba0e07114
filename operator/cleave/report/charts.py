"""Builds the page's charts in reading order, among them those of load, latency and stages. Pure."""

import math
from collections.abc import Iterator, Sequence

import plotly.graph_objects as go

from cleave.planner.plan import Plan
from cleave.planner.result.text import format_ms, format_number, format_percent, format_plan
from cleave.report.figures import Chart, Row, add_rule, create_figure
from cleave.report.load_study import LoadStudy, RateSweep, select_rivals
from cleave.report.tradeoffs import build_frontier_chart, build_tradeoff_chart
from cleave.simulator.outcome import LatencyStage

_PERCENTILES = (50, 90, 95, 99)
_MAX_LINES = 3
_STAGE_COLORS = {
    LatencyStage.PREFILL_QUEUE: "var(--prefill-wait)",
    LatencyStage.PREFILL: "var(--prefill)",
    LatencyStage.TRANSFER: "var(--transfer)",
    LatencyStage.DECODE_QUEUE: "var(--decode-wait)",
    LatencyStage.DECODE: "var(--decode)",
}
_LOAD_FACTORS = (0.25, 0.55, 0.8, 1.0, 1.2, 1.5)


def build_charts(study: LoadStudy) -> Iterator[Chart]:
    """All charts in reading order; those without data are left out."""
    if study.sweeps:
        yield build_attainment_chart(study)
        yield build_cdf_chart(study, "ttft")
        yield build_cdf_chart(study, "tpot")
        yield build_stages_chart(study)
        yield build_frontier_chart(study)
        yield build_tradeoff_chart(study, "ttft")
        yield build_tradeoff_chart(study, "tpot")


def build_attainment_chart(study: LoadStudy) -> Chart:
    """Attainment over rate with target, goodput and requested rate (DistServe, fig. 8)."""
    target, requested_rate = study.report_input.slo.attainment, study.report_input.rate
    sweeps = [_get_sweep(study, plan) for plan in _select_contenders(study)]
    figure = create_figure("rate (req/s)", "requests within the SLO")
    for position, sweep in enumerate(sweeps):
        color, dash = _get_line_style(sweep.plan, position)
        figure.add_scatter(
            x=list(sweep.rates),
            y=list(sweep.attainment),
            name=f"{format_plan(sweep.plan)} ({sweep.plan.gpus} GPUs)",
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
    add_rule(figure, y=target, text=f"target {format_percent(target)}")
    add_rule(figure, x=requested_rate, text=f"requested {format_number(requested_rate)} req/s")
    reach = max(*(1.6 * sweep.plan.prediction.goodput for sweep in sweeps), 1.15 * requested_rate)
    figure.update_xaxes(range=[0, reach])
    figure.update_yaxes(range=[0, 1.04], tickformat=".0%")
    sentences = [
        f"{format_plan(sweep.plan)} holds {format_percent(target)} up to "
        f"{format_number(sweep.plan.prediction.goodput)} req/s"
        for sweep in sweeps
    ]
    return Chart(
        "attainment",
        "How much load each plan carries",
        f"Share of requests within the SLO as the rate rises; {'; '.join(sentences)}.",
        figure,
        ("plan", "rate (req/s)", "attainment", "P90 TTFT", "P90 TPOT"),
        tuple(row for sweep in sweeps for row in _build_sweep_rows(sweep)),
    )


def build_cdf_chart(study: LoadStudy, metric: str) -> Chart:
    """Distribution of one latency at the requested rate, with its target."""
    slo = study.report_input.slo
    name, target = ("TTFT", slo.ttft_ms) if metric == "ttft" else ("TPOT", slo.tpot_ms)
    figure = create_figure(f"{name} (ms)", "share of requests")
    rows, sentences = [], []
    for position, latencies in enumerate(study.latencies):
        color, dash = _get_line_style(latencies.plan, position)
        values = getattr(latencies, f"{metric}_ms")
        share = format_percent(sum(value <= target for value in values) / len(values))
        label = format_plan(latencies.plan)
        sentences.append(f"{label} meets {format_ms(target)} for {share} of requests")
        rows += [
            (label, f"P{position}", format_ms(_get_percentile(values, position)))
            for position in _PERCENTILES
        ]
        figure.add_scatter(
            x=[value if math.isfinite(value) else None for value in values],
            y=[index / (len(values) - 1) for index in range(len(values))],
            name=label,
            mode="lines",
            line={"color": color, "dash": dash, "width": 2.5},
            hovertemplate="%{y:.1%} within %{x:.4g} ms<extra></extra>",
        )
    add_rule(figure, x=target, text=f"target {format_ms(target)}")
    add_rule(figure, y=slo.attainment, text=f"target {format_percent(slo.attainment)}")
    _limit_tail(figure, study, metric, target)
    figure.update_yaxes(range=[0, 1.04], tickformat=".0%")
    return Chart(
        f"cdf-{metric}",
        f"{'Time to first token' if metric == 'ttft' else 'Time per output token'} ({name})",
        f"At {format_number(study.report_input.rate)} req/s: {'; '.join(sentences)}.",
        figure,
        ("plan", "percentile", name),
        tuple(rows),
    )


def build_stages_chart(study: LoadStudy) -> Chart:
    """Shares of the five stages as the load rises (DistServe, section 6.3)."""
    sweep = study.sweeps[0]
    bars = [
        (f"{format_number(sweep.rates[index])} req/s", sweep.stages[index])
        for index in _select_rate_indices(sweep, study.report_input.rate)
    ]
    bars += [
        (f"{format_number(study.report_input.rate)} req/s, {format_plan(other.plan)}", other.stages)
        for other in study.latencies[1:]
    ]
    figure = create_figure("share of all time", "")
    for stage in LatencyStage:
        figure.add_bar(
            y=[name for name, _ in bars],
            x=[shares[stage] for _, shares in bars],
            name=str(stage),
            orientation="h",
            marker={"color": _STAGE_COLORS[stage], "line": {"width": 0}},
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
        f"{format_plan(sweep.plan)} as the rate rises. At the requested rate "
        f"{format_percent(shares_at_rate[largest])} of all time is {largest}, "
        f"{format_percent(shares_at_rate[LatencyStage.TRANSFER])} is KV transfer.",
        figure,
        ("rate and plan", *map(str, LatencyStage)),
        tuple((name, *(f"{shares[s]:.2%}" for s in LatencyStage)) for name, shares in bars),
    )


def _get_percentile(values: Sequence[float], percentile: int) -> float:
    return values[round(percentile / 100 * (len(values) - 1))]


def _select_contenders(study: LoadStudy) -> list[Plan]:
    """The best plan of each kind, and the runner-up of either kind."""
    plans = [sweep.plan for sweep in study.sweeps]
    return list(dict.fromkeys((*select_rivals(plans), *plans[:2])))[:_MAX_LINES]


def _get_sweep(study: LoadStudy, plan: Plan) -> RateSweep:
    return next(sweep for sweep in study.sweeps if sweep.plan is plan)


def _get_line_style(plan: Plan, position: int) -> tuple[str, str]:
    """Color by kind of plan, as for markers; the first line is solid, a third one grey."""
    if position == 2:
        return "var(--third)", "dot"
    color = "var(--first)" if plan.is_disaggregated else "var(--second)"
    return color, "dash" if position else "solid"


def _select_rate_indices(sweep: RateSweep, requested_rate: float) -> list[int]:
    """Indices of selected rates from idle to overload."""
    base = sweep.plan.prediction.goodput or requested_rate
    return [
        min(range(len(sweep.rates)), key=lambda i: abs(sweep.rates[i] - load * base))
        for load in _LOAD_FACTORS
    ]


def _build_sweep_rows(sweep: RateSweep) -> Iterator[Row]:
    for index, rate in enumerate(sweep.rates):
        yield (
            format_plan(sweep.plan),
            format_number(rate),
            format_percent(sweep.attainment[index]),
            format_ms(sweep.ttft_p90_ms[index]),
            format_ms(sweep.tpot_p90_ms[index]),
        )


def _limit_tail(figure: go.Figure, study: LoadStudy, metric: str, target: float) -> None:
    """End the axis at the tail of the better plan; that of the other may be far longer."""
    tails = [_get_percentile(getattr(each, f"{metric}_ms"), 99) for each in study.latencies]
    reach = min((tail for tail in tails if math.isfinite(tail)), default=target)
    figure.update_xaxes(range=[0, 1.25 * max(target, min(reach, 5 * target))])
