"""The day as a page: how many requests were in time while traffic moved, by mode."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import plotly.graph_objects as go
from deployment import MODES, ORACLE
from scoring import Seen
from traffic import Day

COLOURS = {ORACLE: "#888888", "static": "#d62728", "flips": "#ff7f0e", "replans": "#1f77b4",
           "both": "#2ca02c"}  # fmt: skip
BIN_S = 10.0
"""Of the trace."""


def draw(file: Path, day: Day, seen: Mapping[str, Seen]) -> None:
    """One line per mode: the share of the requests of each ten seconds that met both targets."""
    figure = go.Figure()
    for mode, found in seen.items():
        at_s, share = find_shares(day, found)
        text = MODES[mode].text if mode in MODES else "the best plan of each phase, there in time"
        figure.add_scatter(
            x=at_s, y=share, name=f"{mode}: {text}", mode="lines", line={"color": COLOURS[mode]}
        )
    for index, phase in enumerate(day.phases):
        at_s = index * day.phase_ms / 1e3
        figure.add_vline(x=at_s, line_dash="dot", annotation_text=phase.name)
    figure.update_layout(
        template="simple_white",
        xaxis_title="seconds of the trace",
        yaxis={"title": "requests within both targets", "tickformat": ".0%", "range": [0, 1.05]},
        legend={"orientation": "h", "y": -0.2},
    )
    figure.write_html(file)


def find_shares(day: Day, seen: Seen) -> tuple[Sequence[float], Sequence[float]]:
    """Middles of the bins, and the share that met both targets of what arrived in each."""
    attained = seen.attained(day.trace)
    arrival_s = day.trace.arrival_ms / 1e3
    edges = np.arange(0.0, len(day.phases) * day.phase_ms / 1e3 + BIN_S, BIN_S)
    arrived, _ = np.histogram(arrival_s, edges)
    met, _ = np.histogram(arrival_s[attained], edges)
    some = arrived > 0
    return list((edges[:-1] + BIN_S / 2)[some]), list(met[some] / arrived[some])
