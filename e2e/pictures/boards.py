"""The chart's Grafana dashboards as values: what each panel asks, and what Grafana makes of it.

`run.py` evaluates the queries, `page.py` draws the answers. Pure but for `read_boards`.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_VARIABLE = re.compile(r"\$(\w+)")
_LABEL = re.compile(r"{{\s*(\w+)\s*}}")
_RATE_SCRAPES = 4
"""Grafana's $__rate_interval holds at least as many scrapes."""
KINDS = ("timeseries", "stat", "table", "heatmap")
"""Panels that `page.py` draws, by Grafana's names."""


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel."""

    text: str
    legend: str
    """Grafana's pattern of the names of its series: `{{label}}`."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart."""

    title: str
    unit: str
    decimals: int | None
    """Of values; None: as many as they need."""
    queries: tuple[Query, ...]
    kind: str = "timeseries"
    """One of KINDS."""
    width: int = 8
    """Of the grid's 24 columns."""
    height: int = 7
    """In rows of the grid."""


@dataclass(frozen=True, slots=True)
class Row:
    """A titled row of panels."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard; `name` is its file's."""

    name: str
    title: str
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """Of all rows."""
        return tuple(panel for row in self.rows for panel in row.panels)


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel: Unix times in seconds, and values; None is a gap."""

    name: str
    points: tuple[tuple[float, float | None], ...]


def read_boards(folder: Path) -> list[Board]:
    """Every dashboard of a folder, in the order of their files' names."""
    return [parse_board(file.stem, json.loads(file.read_text())) for file in folder.glob("*.json")]


def parse_board(name: str, document: Mapping[str, Any]) -> Board:
    """A dashboard as Grafana imports it."""
    rows: list[tuple[str, list[Panel]]] = []
    for each in document["panels"]:
        if each["type"] == "row":
            rows.append((each["title"], []))
            continue
        assert each["type"] in KINDS, f"{each['title']}: {each['type']} cannot be drawn"
        rows[-1][1].append(_parse_panel(each))
    parsed = tuple(Row(title, tuple(panels)) for title, panels in rows)
    return Board(name, document["title"], parsed)


def _parse_panel(document: Mapping[str, Any]) -> Panel:
    queries = [Query(each["expr"], each["legendFormat"]) for each in document["targets"]]
    defaults = document["fieldConfig"]["defaults"]
    return Panel(
        document["title"],
        defaults["unit"],
        defaults.get("decimals"),
        tuple(queries),
        document["type"],
        document["gridPos"]["w"],
        document["gridPos"]["h"],
    )


def compute_rate_interval(scrape_s: int, step_s: int) -> int:
    """Seconds of Grafana's $__rate_interval: four scrapes, or a step and a scrape if longer."""
    return max(_RATE_SCRAPES * scrape_s, step_s + scrape_s)


def fill_variables(query: str, values: Mapping[str, str]) -> str:
    """The query with Grafana's variables replaced. Raises KeyError for an unknown one."""
    return _VARIABLE.sub(lambda found: values[found[1]], query)


def name_series(legend: str, labels: Mapping[str, str]) -> str:
    """What Grafana's legend shows for a series; labels that it lacks are left out."""
    return _LABEL.sub(lambda found: labels.get(found[1], ""), legend).strip()


def build_series(legend: str, samples: Sequence[Mapping[str, Any]], step_s: float) -> list[Series]:
    """The lines of one query from the answer to its range query. A line is interrupted where a step
    has no value, or one that is no number."""
    built = []
    for sample in samples:
        points = [(float(at), float(value)) for at, value in sample["values"]]
        finite = [(at, value) for at, value in points if math.isfinite(value)]
        if finite:
            name = name_series(legend, sample["metric"])
            built.append(Series(name, tuple(_interrupt(finite, step_s))))
    return built


def _interrupt(
    points: Sequence[tuple[float, float]], step_s: float
) -> Iterator[tuple[float, float | None]]:
    previous_s = math.inf
    for at, value in points:
        if at - previous_s > 1.5 * step_s:
            yield previous_s + step_s, None
        yield at, value
        previous_s = at
