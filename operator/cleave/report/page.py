"""Renders the page: one HTML file that contains its styles, script, plotly.js and all data.

Called by `cleave plan --report`. What is hard: it must work from a mail attachment, so nothing is
loaded from elsewhere. plotly.js is by far the largest part; it is stored compressed and unpacked by
the browser, which makes the file a third of the size.
"""

import base64
import gzip
import json
from collections.abc import Iterator
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from plotly.offline import get_plotlyjs

from cleave.planner.plan import Plan
from cleave.planner.result.text import (
    VERDICT_TEXTS,
    describe_pool,
    format_ms,
    format_number,
    format_percent,
    format_plan,
    format_targets,
    strip_verdict,
)
from cleave.report import tables
from cleave.report.charts import build_charts
from cleave.report.figures import Chart
from cleave.report.layout import lay_out
from cleave.report.load_study import LoadStudy
from cleave.report.node_drawing import describe_node, draw_nodes
from cleave.report.what_if import WhatIf, WhatIfPoint, compute_what_if


def render_page(study: LoadStudy) -> str:
    """The complete HTML file."""
    drawn = {chart.key: chart for chart in build_charts(study)}
    points = compute_what_if(study) if study.sweeps else None
    body = "\n".join(_render_body(study, drawn, points))
    data = {
        "charts": {key: chart.figure.to_plotly_json() for key, chart in drawn.items()},
        "whatIf": points and _dump_points(points),
        "plans": [
            {"label": format_plan(sweep.plan), "text": _describe_plan(sweep.plan)}
            for sweep in study.sweeps
        ],
    }
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Plan for {escape(study.report_input.deployment)} - Cleave</title>
<link rel="icon" href="data:,">
<style>{_load_asset("page.css")}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{_dump_json(data)}</script>
<script type="application/octet-stream" id="plotly">{_load_plotly()}</script>
<script>{_load_asset("page.js")}</script>
</body>
</html>
"""


def _render_body(study: LoadStudy, drawn: dict[str, Chart], points: WhatIf | None) -> Iterator[str]:
    yield "<main>"
    yield _render_header(study)
    yield _render_warnings(study)
    figures = {key: _render_figure(chart) for key, chart in drawn.items()}
    if study.sweeps:
        yield _render_section("Load", figures["attainment"])
        yield _render_section("Latency", figures["cdf-ttft"], figures["cdf-tpot"], columns=2)
        yield _render_section("Stages", figures["stages"])
    if study.result.selected:
        yield _render_section("Layout", _render_layout(study.result.selected, study))
    if points:
        yield _render_section("What if", _render_sliders(points, study))
        plans = tables.render_plans(study.result, study.report_input.rate, study.neighbours)
        charts = (figures[key] for key in ("frontier", "tradeoff-ttft", "tradeoff-tpot"))
        yield _render_section("Alternatives", plans, *charts, columns=3)
    yield _render_section("How it was found", _render_method(study))
    yield "</main>"


def _render_header(study: LoadStudy) -> str:
    result, subject, slo = study.result, study.report_input, study.report_input.slo
    chosen = result.selected
    headline = _describe_plan(chosen) if chosen else "No plan holds this SLO"
    if chosen:
        tiles = tables.render_tiles(chosen, slo)
    else:
        nearest = result.nearest_slo
        tiles = tables.render_nearest_slo(nearest, slo) if nearest else ""
    worth = f"<p><b>Reuse.</b> {escape(result.reuse.text)}</p>\n" if result.reuse else ""
    return f"""<header class="card hero">
<p class="overline">Cleave plan for <b>{escape(subject.deployment)}</b></p>
<h1><span class="verdict {result.verdict.lower()}">{VERDICT_TEXTS[result.verdict]}</span>
{escape(headline)}</h1>
<p class="reason">{escape(strip_verdict(result))}</p>
<dl class="tiles">{tiles}</dl>
<p class="change"><b>What would change it.</b> {escape(result.what_would_change)}</p>
{worth}<p class="asked"><b>Requested:</b> {escape(subject.model)};
{format_percent(slo.attainment)} of requests within {format_targets(slo)};
{format_number(subject.rate)} req/s; {escape(subject.traffic)}; at most {subject.max_gpus} GPUs.</p>
</header>"""


def _render_warnings(study: LoadStudy) -> str:
    if not study.result.warnings:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in study.result.warnings)
    return f'<aside class="card warnings"><h2>Warnings</h2><ul>{items}</ul></aside>'


def _render_section(title: str, *parts: str, columns: int = 1) -> str:
    inner = "\n".join(parts)
    return (
        f'<section class="card"><h2>{escape(title)}</h2>'
        f'<div class="columns columns-{columns}">{inner}</div></section>'
    )


def _render_figure(chart: Chart) -> str:
    note, key = escape(chart.caption), chart.key
    numbers = tables.render_table(chart.title, chart.heading, chart.rows)
    return f"""<figure aria-labelledby="{key}-title">
<h3 id="{key}-title">{escape(chart.title)}</h3>
<div class="plot" id="plot-{key}" data-chart="{key}" role="img" aria-label="{note}"></div>
<figcaption>{note}</figcaption>
<details><summary>Numbers</summary>{numbers}</details>
</figure>"""


def _render_layout(plan: Plan, study: LoadStudy) -> str:
    nodes = lay_out(plan, study.report_input.nodes)
    rows = [(f"node {index}", node.gpu, describe_node(node)) for index, node in enumerate(nodes)]
    keys = "".join(
        f'<li><span class="swatch {pool.role}"></span>{escape(describe_pool(pool))}</li>'
        for pool in plan.pools
    )
    shown_gpus = sum(segment.gpus for node in nodes for segment in node.segments)
    missing = (
        f'<p class="note">{plan.gpus - shown_gpus} GPUs find no room in whole nodes.</p>'
        if shown_gpus < plan.gpus
        else ""
    )
    return f"""<figure><h3>GPU by GPU</h3>
<ul class="legend">{keys}<li><span class="swatch free"></span>free</li></ul>
{draw_nodes(nodes)}{missing}
<figcaption>One square is a GPU, one frame the GPUs that hold one pipeline stage (s0, s1, ...) of
an instance. One way to place the plan; the scheduler may find another.</figcaption>
<details><summary>Numbers</summary>{
        tables.render_table("GPU by GPU", ("node", "GPU", "what runs there"), rows)
    }</details></figure>"""


def _render_sliders(points: WhatIf, study: LoadStudy) -> str:
    sliders = zip(
        ("rate", "ttft", "tpot"),
        ("Rate", "TTFT target", "TPOT target"),
        (points.rates, points.ttft_ms, points.tpot_ms),
        points.start,
        strict=True,
    )
    rows = "".join(
        f'<div class="slider"><label for="slider-{key}">{name}</label>'
        f'<output id="value-{key}" for="slider-{key}"></output>'
        f'<input type="range" id="slider-{key}" min="0" max="{len(values) - 1}" step="1" '
        f'value="{start}" data-start="{start}"></div>'
        for key, name, values, start in sliders
    )
    return f"""<div class="what-if">
<div class="sliders">{rows}
<button type="button" id="reset">as requested</button></div>
<div class="tiles" aria-live="polite">
<div class="tile wide"><dt>best plan</dt><dd id="what-plan">-</dd></div>
<div class="tile"><dt>goodput per GPU</dt><dd id="what-per-gpu">-</dd></div>
<div class="tile"><dt>GPUs</dt><dd id="what-gpus">-</dd></div>
<div class="tile"><dt>goodput</dt><dd id="what-goodput">-</dd></div>
</div>
<p class="note">Among {len(study.sweeps)} plans: those found for the request and their
neighbours, each as it is or in whole copies. With other targets a new search may find a better
one.</p>
</div>"""


def _render_method(study: LoadStudy) -> str:
    result = study.result
    facts = (
        ("candidates", f"{result.num_candidates:,}"),
        ("simulated requests", f"{result.num_simulated_requests:,}"),
        ("time", f"{result.elapsed_s:.2f} s"),
        ("seed", str(study.report_input.seed)),
    )
    items = "".join(f'<div class="tile"><dt>{k}</dt><dd>{v}</dd></div>' for k, v in facts)
    return (
        f'<div><dl class="tiles">{items}</dl>{tables.render_trust(result)}'
        '<p class="note">Goodput is the highest rate at which the target is met, by bisection over '
        "a discrete-event simulation of every instance. Predictions are at the requested "
        "rate.</p></div>"
    )


def _describe_plan(plan: Plan) -> str:
    return " and ".join(describe_pool(pool) for pool in plan.pools)


def _dump_points(points: WhatIf) -> dict[str, Any]:
    return {
        "rate": [f"{format_number(rate)} req/s" for rate in points.rates],
        "ttft": [format_ms(value) for value in points.ttft_ms],
        "tpot": [format_ms(value) for value in points.tpot_ms],
        "points": [_dump_point(point) if point.plan >= 0 else None for point in points.points],
        "copies": [point.copies for point in points.points],
    }


def _dump_point(point: WhatIfPoint) -> list[int | str]:
    goodput = point.goodput * point.copies
    return [point.plan, format_number(goodput), format_number(goodput / point.gpus), point.gpus]


def _dump_json(data: dict[str, Any]) -> str:
    """JSON that is safe inside a script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _load_plotly() -> str:
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def _load_asset(name: str) -> str:
    return files("cleave.report").joinpath(name).read_text(encoding="utf-8")
