"""Builders of Grafana dashboards: queries, panels, rows. Used by dashboards.py."""

from dataclasses import dataclass

from grafana_foundation_sdk.builders.common import VizLegendOptions, VizTooltipOptions
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DatasourceVariable,
    QueryVariable,
    Row,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH, HEIGHT = 8, 7
"""Three panels side by side."""
MODEL = 'model=~"$model"'
RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Line:
    """One query."""

    name: str
    """Legend format of its series."""
    query: str


@dataclass(frozen=True, slots=True)
class Graph:
    """One panel."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    text: str = ""
    """Description."""


def make_board(name: str, title: str, text: str) -> Dashboard:
    """An empty dashboard with variables for the data source and the models."""
    return (
        Dashboard(title)
        .uid(f"cleave-{name}")
        .description(text)
        .tags(["cleave"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(
            QueryVariable("model")
            .label("Model")
            .query("label_values(cleave_gateway_instances, model)")
            .datasource(SOURCE)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        )
    )


def add(dashboard: Dashboard, title: str, *graphs: Graph) -> None:
    """Add a row of panels, three side by side."""
    dashboard.with_row(Row(title))
    for graph in graphs:
        dashboard.with_panel(_make_panel(graph))


def _make_panel(graph: Graph) -> Panel:
    panel = (
        Panel()
        .title(graph.title)
        .description(graph.text)
        .unit(graph.unit)
        .min(0)
        .datasource(SOURCE)
        .span(WIDTH)
        .height(HEIGHT)
        .fill_opacity(8)
        .legend(
            VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
    )
    for line in graph.lines:
        panel.with_target(Dataquery().expr(line.query).legend_format(line.name))
    return panel


def sum_rates(counter: str, labels: str = "") -> str:
    """PromQL: the increase of a counter per second, summed by `labels`."""
    by = f" by ({labels})" if labels else ""
    return f"sum{by} (rate({counter}{RATE}))"


def find_quantile(share: float, histogram: str, labels: str = "", of: str = f"{{{MODEL}}}") -> str:
    """PromQL: a quantile of a histogram over all instances, or by `labels`."""
    by = f"le, {labels}" if labels else "le"
    return f"histogram_quantile({share}, sum by ({by}) (rate({histogram}_bucket{of}{RATE})))"


def find_quantiles(histogram: str, target: str = "") -> tuple[Line, ...]:
    """P50, P90 and P99 of a histogram, and the SLO `target` if it has one."""
    lines = [Line(f"P{s * 100:.0f}", find_quantile(s, histogram)) for s in (0.5, 0.9, 0.99)]
    if target:
        query = f'max(cleave_gateway_slo_target_seconds{{slo="{target}"}})'
        lines.append(Line("target", query))
    return tuple(lines)
