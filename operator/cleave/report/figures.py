"""What all charts of the page share: an empty figure and reference lines.

Pure. Colors are CSS variables (`var(--prefill)`): the page replaces them by those of the reader's
theme.
"""

import math
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure with its title, caption and table."""

    key: str
    title: str
    caption: str
    """Description in one sentence; screen readers read it instead of the picture."""
    figure: go.Figure
    heading: Row
    rows: tuple[Row, ...]
    """The same data as a table."""


def create_figure(x: str, y: str) -> go.Figure:
    """An empty figure with axis titles."""
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


def add_rule(
    figure: go.Figure, *, text: str, x: float | None = None, y: float | None = None
) -> None:
    """A thin labelled line across the plot, vertical at `x` or horizontal at `y`."""
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
