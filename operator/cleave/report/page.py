"""Renders the page: one HTML file that contains its styles, script, plotly.js and all data.

Called by `cleave plan --report`. What is hard: it must work from a mail attachment, so nothing is
loaded from elsewhere. plotly.js is by far the largest part; it is stored compressed and unpacked by
the browser, which makes the file a third of the size.
"""

import base64
import gzip
import json
from collections.abc import Iterator, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from plotly.offline import get_plotlyjs

from cleave.planner.plan import Plan
from cleave.planner.result.text import (
    VERDICTS,
    milliseconds,
    number,
    percent,
    plan_label,
    pool_sentence,
    reason_alone,
)
from cleave.report import tables
from cleave.report.charts import charts
from cleave.report.figures import Chart
from cleave.report.layout import lay_out
from cleave.report.load_study import Study
from cleave.report.node_drawing import describe, draw
from cleave.report.what_if import WhatIf, what_if


def page(study: Study) -> str:
    """The complete HTML file."""
    drawn = {chart.key: chart for chart in charts(study)}
    points = what_if(study) if study.sweeps else None
    body = "\n".join(_body(study, drawn, points))
    data = {
        "charts": {key: chart.figure.to_plotly_json() for key, chart in drawn.items()},
        "whatIf": _points(points),
        "plans": [
            {"label": plan_label(sweep.plan), "text": _in_words(sweep.plan)}
            for sweep in study.sweeps
        ],
    }
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Plan for {escape(study.subject.deployment)} - Cleave</title>
<link rel="icon" href="data:,">
<style>{_part("page.css")}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{_json(data)}</script>
<script type="application/octet-stream" id="plotly">{_plotly()}</script>
<script>{_part("page.js")}</script>
</body>
</html>
"""


def _body(study: Study, drawn: dict[str, Chart], points: WhatIf | None) -> Iterator[str]:
    yield "<main>"
    yield _header(study)
    yield _warnings(study)
    if study.sweeps:
        yield _section("Load", [_figure(drawn["attainment"])])
        yield _section(
            "Latency", [_figure(drawn["cdf-ttft"]), _figure(drawn["cdf-tpot"])], columns=2
        )
        yield _section("Stages", [_figure(drawn["stages"])])
    if study.answer.selected:
        yield _section("Layout", [_layout(study.answer.selected, study)])
    if points:
        yield _section("What if", [_sliders(points, study)])
        yield _section(
            "Alternatives",
            [
                tables.plans(study.answer, study.subject.rate, study.neighbours),
                *(_figure(drawn[key]) for key in ("frontier", "tradeoff-ttft", "tradeoff-tpot")),
            ],
            columns=3,
        )
    yield _section("How it was found", [_method(study)])
    yield "</main>"


def _header(study: Study) -> str:
    result, subject, slo = study.answer, study.subject, study.subject.slo
    chosen = result.selected
    headline = _in_words(chosen) if chosen else "No plan holds this SLO"
    if chosen:
        tiles = tables.tiles(chosen, slo)
    else:
        tiles = tables.nearest(result.nearest_slo) if result.nearest_slo else ""
    return f"""<header class="card hero">
<p class="overline">Cleave plan for <b>{escape(subject.deployment)}</b></p>
<h1><span class="verdict {result.verdict.lower()}">{VERDICTS[result.verdict]}</span>
{escape(headline)}</h1>
<p class="reason">{escape(reason_alone(result))}</p>
<dl class="tiles">{tiles}</dl>
<p class="change"><b>What would change it.</b> {escape(result.what_would_change)}</p>
<p class="asked"><b>Requested:</b> {escape(subject.model)}; {percent(slo.attainment)} of requests
with TTFT within {milliseconds(slo.ttft_ms)} and TPOT within {milliseconds(slo.tpot_ms)};
{number(subject.rate)} req/s; {escape(subject.traffic)}; at most {subject.max_gpus} GPUs.</p>
</header>"""


def _warnings(study: Study) -> str:
    if not study.answer.warnings:
        return ""
    items = "".join(f"<li>{escape(text)}</li>" for text in study.answer.warnings)
    return f'<aside class="card warnings"><h2>Warnings</h2><ul>{items}</ul></aside>'


def _section(title: str, parts: Sequence[str], columns: int = 1) -> str:
    inner = "\n".join(parts)
    return (
        f'<section class="card"><h2>{escape(title)}</h2>'
        f'<div class="columns columns-{columns}">{inner}</div></section>'
    )


def _figure(chart: Chart) -> str:
    note, key = escape(chart.note), chart.key
    return f"""<figure aria-labelledby="{key}-title">
<h3 id="{key}-title">{escape(chart.title)}</h3>
<div class="plot" id="plot-{key}" data-chart="{key}" role="img" aria-label="{note}"></div>
<figcaption>{note}</figcaption>
<details><summary>Numbers</summary>{tables.table(chart.title, chart.heading, chart.rows)}</details>
</figure>"""


def _layout(plan: Plan, study: Study) -> str:
    nodes = lay_out(plan, study.subject.nodes)
    rows = [(f"node {index}", node.gpu, describe(node)) for index, node in enumerate(nodes)]
    keys = "".join(
        f'<li><span class="swatch {pool.role}"></span>{escape(pool_sentence(pool))}</li>'
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
{draw(nodes)}{missing}
<figcaption>One square is a GPU, one frame the GPUs that hold one pipeline stage (s0, s1, ...) of
an instance. One way to place the plan; the scheduler may find another.</figcaption>
<details><summary>Numbers</summary>{
        tables.table("GPU by GPU", ("node", "GPU", "what runs there"), rows)
    }</details></figure>"""


def _sliders(points: WhatIf, study: Study) -> str:
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


def _method(study: Study) -> str:
    result = study.answer
    facts = (
        ("candidates", f"{result.num_candidates:,}"),
        ("simulated requests", f"{result.num_simulated_requests:,}"),
        ("time", f"{result.elapsed_s:.2f} s"),
        ("seed", str(study.subject.seed)),
    )
    items = "".join(f'<div class="tile"><dt>{k}</dt><dd>{v}</dd></div>' for k, v in facts)
    return (
        f'<div><dl class="tiles">{items}</dl>{tables.trust(result)}'
        '<p class="note">Goodput is the highest rate at which the target is met, by bisection over '
        "a discrete-event simulation of every instance. Predictions are at the requested "
        "rate.</p></div>"
    )


def _in_words(plan: Plan) -> str:
    return " and ".join(pool_sentence(pool) for pool in plan.pools)


def _points(points: WhatIf | None) -> dict[str, Any] | None:
    if points is None:
        return None
    return {
        "rate": [f"{number(rate)} req/s" for rate in points.rates],
        "ttft": [milliseconds(value) for value in points.ttft_ms],
        "tpot": [milliseconds(value) for value in points.tpot_ms],
        "points": [
            [p.plan, number(p.goodput * p.copies), number(p.goodput * p.copies / p.gpus), p.gpus]
            if p.plan >= 0
            else None
            for p in points.points
        ],
        "copies": [point.copies for point in points.points],
    }


def _json(data: dict[str, Any]) -> str:
    """JSON that is safe inside a script element."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


@cache
def _plotly() -> str:
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), 9, mtime=0)).decode()


def _part(name: str) -> str:
    return files("cleave.report").joinpath(name).read_text(encoding="utf-8")
