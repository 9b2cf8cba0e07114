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
_PANEL_PX = 380, 190
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
section { display: grid; grid-template-columns: repeat(3, 1fr); gap: 8px; }
article { background: white; border: 1px solid #e4e7e7; border-radius: 2px; padding: 6px 4px; }
h3 { margin: 0 6px; font-size: 13px; font-weight: 500; }
ul { margin: 0 8px 2px; padding: 0; list-style: none;
  display: flex; flex-wrap: wrap; gap: 2px 12px; font-size: 12px; }
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
            figure = _build_figure(panel, drawn[panel], since_s, until_s).to_json()
            draw = f"Plotly.newPlot('c{number}', {{...{figure}, config: {{staticPlot: true}}}})"
            title, legend = html.escape(panel.title), _build_legend(drawn[panel])
            parts.append(
                f'<article><h3>{title}</h3><div id="c{number}"></div>{legend}</article>'
                f"<script>drawn.push({draw})</script>"
            )
            number += 1
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
    if panel.unit not in _SUFFIXES:
        raise UnknownUnitError(f"{panel.title}: no axis for the unit {panel.unit}")
    figure = go.Figure()
    for number, line in enumerate(series):
        figure.add_scatter(
            x=[datetime.fromtimestamp(at, UTC) for at, _ in line.points],
            y=[value for _, value in line.points],
            mode="lines+markers",
            line={"color": _get_color(number), "width": 1.5},
            marker={"size": _list_sizes(line)},
        )
    width, height = _PANEL_PX
    grid = {"gridcolor": "#eceeee", "tickfont": {"size": 11}, "zeroline": False}
    figure.update_layout(
        template="simple_white",
        width=width,
        height=height,
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
    return figure


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
