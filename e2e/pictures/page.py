"""One dashboard as a page of charts in Grafana's layout, and its picture, by Debian's Chromium."""

import html
import os
import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import plotly.graph_objects as go
from playwright.sync_api import sync_playwright
from plotly.offline import get_plotlyjs

from e2e.pictures.boards import Board, Panel, Series

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium")
WIDTH_PX = 1200
_BROWSER_MS = 180_000
_COLUMN_PX, _GAP_PX = 41.5, 8
"""Of the grid, 24 in a row."""
_FIGURE_PX = 190
_SPARKLINE_PX, _ROW_PX = -66, 28
"""Heights: of a chart, of the line below a number without its panel's rows, of such a row."""
_COLORS = ("#56A64B", "#E0A400", "#3274D9", "#E02F44", "#8F3BB8", "#FF780A", "#19A9A9", "#7C4A1E")
"""Those of Grafana's light theme, darker where they are hard to see on white."""
_SUFFIXES = {
    "s": "s", "percentunit": "", "reqps": " req/s", "ops": " ops/s", "cps": " c/s", "Bps": "B/s",
    "bytes": "B", "short": "", "none": "",
}  # fmt: skip
"""Of values, by Grafana's units."""
_SCALED = ("s", "Bps", "bytes")
"""Units with prefixes below one: ms, but no mreq/s."""
_FEW = 5
"""Up to so many objects, every line of the grid is one."""
_STYLE = """
body { margin: 0; padding: 10px; width: 1180px; background: #f4f5f5;
  font: 13px Inter, sans-serif; color: #24292e; }
h1 { margin: 2px 4px 8px; font-size: 18px; font-weight: 500; }
h2 { margin: 10px 4px 4px; font-size: 15px; font-weight: 500; }
section { display: grid; grid-template-columns: repeat(24, 1fr); gap: 8px; }
article { background: white; border: 1px solid #e4e7e7; border-radius: 2px; padding: 6px 4px; }
h3 { margin: 0 6px; font-size: 13px; font-weight: 500; }
ul { margin: 0 8px 2px; padding: 0; list-style: none;
  display: flex; flex-wrap: wrap; gap: 2px 12px; font-size: 12px; }
p { margin: 2px 8px; font-size: 12px; }
b { font-size: 24px; font-weight: 500; margin-right: 8px; }
table { margin: 6px 8px; width: 94%; border-collapse: collapse; font-size: 12px; }
td { border-bottom: 1px solid #eceeee; padding: 3px 0; }
td + td { text-align: right; }
i { display: inline-block; width: 14px; height: 3px; margin-right: 4px; vertical-align: middle; }
"""

Drawn = Mapping[Panel, Sequence[Series]]
"""Panels with their lines; those without lines are left out of the picture."""


class UnknownUnitError(ValueError):
    """A panel has a unit that `_SUFFIXES` lacks."""


def build_page(board: Board, drawn: Drawn, since_s: float, until_s: float) -> str:
    """The dashboard as HTML from `since_s` to `until_s`, in Unix time. Raises UnknownUnitError."""
    parts, number = [f"<h1>{html.escape(board.title)}</h1>"], 0
    for row in board.rows:
        panels = [panel for panel in row.panels if drawn.get(panel)]
        if not panels:
            continue
        parts.append(f"<h2>{html.escape(row.title)}</h2><section>")
        for panel in panels:
            if panel.unit not in _SUFFIXES:
                raise UnknownUnitError(f"{panel.title}: no axis for the unit {panel.unit}")
            title, series = html.escape(panel.title), drawn[panel]
            parts.append(f'<article style="grid-column: span {panel.width}"><h3>{title}</h3>')
            parts.append(_build_texts(panel, series))
            if panel.kind != "table":
                figure = _build_figure(panel, series, since_s, until_s).to_json()
                draw = f"Plotly.newPlot('c{number}', {{...{figure}, config: {{staticPlot: true}}}})"
                parts.append(f'<div id="c{number}"></div><script>drawn.push({draw})</script>')
                number += 1
            if panel.kind == "timeseries":
                parts.append(_build_legend(series))
            parts.append("</article>")
        parts.append("</section>")
    end = "<script>Promise.all(drawn).then(() => document.body.dataset.drawn = 1)</script>"
    return (
        f'<!doctype html><meta charset="utf-8"><style>{_STYLE}</style>'
        f"<script>{get_plotlyjs()}; const drawn = []</script><body>{''.join(parts)}{end}"
    )


def take_pictures(pages: Mapping[Path, str]) -> None:
    """Write pages as PNG files; the browser reaches no network."""
    with sync_playwright() as playwright:
        # As root Chromium refuses its sandbox; the pages are our own.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        context = browser.new_context(offline=True, viewport={"width": WIDTH_PX, "height": 400})
        context.set_default_timeout(_BROWSER_MS)
        for file, text in pages.items():
            source = file.with_suffix(".html")
            source.write_text(text)
            page = context.new_page()
            page.goto(source.absolute().as_uri())
            page.wait_for_selector("body[data-drawn]")
            page.screenshot(path=file, full_page=True)
            page.close()
            source.unlink()
        browser.close()


def _build_figure(
    panel: Panel, series: Sequence[Series], since_s: float, until_s: float
) -> go.Figure:
    figure = go.Figure()
    if panel.kind == "heatmap":
        return _add_buckets(figure, panel, series)
    for number, line in enumerate(series):
        figure.add_scatter(
            x=[datetime.fromtimestamp(at, UTC) for at, _ in line.points],
            y=[value for _, value in line.points],
            mode="lines+markers",
            line={"color": _get_color(number), "width": 1.5},
            marker={"size": _list_sizes(line)},
        )
    grid = {"gridcolor": "#eceeee", "tickfont": {"size": 11}, "zeroline": False}
    figure.update_layout(
        template="simple_white",
        width=_compute_width_px(panel),
        height=_FIGURE_PX,
        showlegend=False,
        margin={"l": 62, "r": 10, "t": 6, "b": 22},
        xaxis={
            **grid,
            "range": [datetime.fromtimestamp(at, UTC) for at in (since_s, until_s)],
            "tickformat": "%H:%M",
            "showgrid": True,
            "nticks": 6,
        },
        yaxis={
            **grid,
            **_describe_values(panel, series),
            "rangemode": "tozero",
            "showgrid": True,
        },
    )
    if panel.kind == "stat":
        hidden = {"visible": False}
        figure.update_layout(
            height=_SPARKLINE_PX + _ROW_PX * panel.height,
            xaxis=hidden,
            yaxis=hidden,
            margin={"l": 8, "r": 8, "b": 4},
        )
    return figure


def _compute_width_px(panel: Panel) -> float:
    """Of its figure, within its frame."""
    return panel.width * _COLUMN_PX + (panel.width - 2) * _GAP_PX


def _add_buckets(figure: go.Figure, panel: Panel, series: Sequence[Series]) -> go.Figure:
    """The observations of each bucket over time. Prometheus' buckets contain those below them."""
    ordered = sorted(series, key=lambda line: float(line.name))
    steps = sorted({at for line in ordered for at, _ in line.points})
    totals = [dict(line.points) for line in ordered]
    counts = [[total.get(at) or 0.0 for at in steps] for total in totals]
    own = [
        [max(0.0, count - below) for count, below in zip(counts[row], lower, strict=True)]
        for row, lower in enumerate([[0.0] * len(steps), *counts[:-1]])
    ]
    # Empty buckets at both ends would fill most of the picture.
    filled = [row for row, cells in enumerate(own) if any(cells)] or [0]
    shown = slice(filled[0], filled[-1] + 1)
    figure.add_heatmap(
        x=[datetime.fromtimestamp(at, UTC) for at in steps],
        y=[f"{line.name} {_SUFFIXES[panel.unit]}" for line in ordered[shown]],
        z=own[shown],
        colorscale="YlOrRd",
        showscale=False,
    )
    figure.update_layout(
        template="simple_white",
        width=_compute_width_px(panel),
        height=_FIGURE_PX,
        margin={"l": 62, "r": 10, "t": 6, "b": 22},
        xaxis={"tickformat": "%H:%M", "nticks": 6},
        yaxis={"type": "category", "tickfont": {"size": 10}},
    )
    return figure


def _build_texts(panel: Panel, series: Sequence[Series]) -> str:
    """The last values of numbers and tables, of series that have not ended; empty for charts."""
    end_s = max(line.points[-1][0] for line in series)
    present = [line for line in series if line.points[-1][0] == end_s]
    lasts = [(html.escape(line.name), _write_last(panel, line)) for line in present]
    if panel.kind == "stat":
        return "".join(f"<p><b>{value}</b>{name}</p>" for name, value in lasts)
    if panel.kind == "table":
        rows = (f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in lasts)
        return f"<table>{''.join(rows)}</table>"
    return ""


def _write_last(panel: Panel, line: Series) -> str:
    """The last value as Grafana writes it: three digits, milliseconds below a second."""
    (*_, value) = [value for _, value in line.points if value is not None]
    if panel.unit == "percentunit":
        return f"{value:.{panel.decimals or 0}%}"
    if panel.unit == "s" and value < 1:
        return f"{value * 1e3:.3g} ms"
    number = f"{value:,.0f}" if panel.decimals == 0 else f"{value:.3g}"
    return number + (" s" if panel.unit == "s" else _SUFFIXES[panel.unit])


def _describe_values(panel: Panel, series: Sequence[Series]) -> dict[str, object]:
    """What the vertical axis writes, in plotly's words."""
    most = max(value for line in series for _, value in line.points if value is not None)
    axis: dict[str, object] = {"ticksuffix": _SUFFIXES[panel.unit], "nticks": 5}
    if panel.unit == "percentunit":
        return {**axis, "tickformat": ".0%"}
    if panel.decimals == 0 and most <= _FEW:
        return {**axis, "dtick": 1, "range": [0, max(1.0, most) * 1.08]}
    is_scaled = panel.unit in _SCALED or most >= 1_000
    return {**axis, "tickformat": "~s" if is_scaled else "~g"}


def _list_sizes(line: Series) -> list[int]:
    """Of the points' marks: only points without neighbours have one, as no line shows them."""
    values = [None, *(value for _, value in line.points), None]
    alone = (
        before is None and after is None
        for before, after in zip(values[:-2], values[2:], strict=True)
    )
    return [4 if is_alone else 0 for is_alone in alone]


def _build_legend(series: Sequence[Series]) -> str:
    entries = (
        f'<li><i style="background:{_get_color(number)}"></i>{html.escape(line.name)}</li>'
        for number, line in enumerate(series)
    )
    return f"<ul>{''.join(entries)}</ul>"


def _get_color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]
