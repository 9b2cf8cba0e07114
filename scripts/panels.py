"""Builders of Grafana dashboards: queries, panels, rows. Used by dashboards.py."""

from dataclasses import dataclass
from string import ascii_uppercase

from grafana_foundation_sdk.builders.common import VizLegendOptions, VizTooltipOptions
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
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
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    VariableRefresh,
)

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH, HEIGHT = 8, 7
"""Three panels side by side."""
NAMESPACE = 'namespace=~"$namespace"'
"""That of a gateway's or engine's pod, not of what an operator reports."""
MODEL = f'{NAMESPACE},model=~"$model"'
PLANNED = 'deployment=~"($namespace)/.*",model=~"$model"'
"""The same for what operators report of deployments."""
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
    decimals: int | None = None
    """Of the axis and the values; None: as many as they need."""


def make_board(name: str, title: str, text: str) -> Dashboard:
    """An empty dashboard with variables for the data source, namespaces and models, and links to
    the others."""
    return (
        Dashboard(title)
        .uid(f"cleave-{name}")
        .description(text)
        .tags(["cleave"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(_make_variable("namespace", "cleave_gateway_instances"))
        .with_variable(_make_variable("model", f"cleave_gateway_instances{{{NAMESPACE}}}"))
        .link(
            DashboardLink("Cleave")
            .type(DashboardLinkType.DASHBOARDS)
            .tags(["cleave"])
            .keep_time(True)
            .include_vars(True)
        )
    )


def _make_variable(label: str, metric: str) -> QueryVariable:
    """Any number of the values of a label. All of them match series without that label as well."""
    return (
        QueryVariable(label)
        .label(label.capitalize())
        .query(f"label_values({metric}, {label})")
        .datasource(SOURCE)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
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
    if graph.decimals is not None:
        panel.decimals(graph.decimals)
    for ref_id, line in zip(ascii_uppercase, graph.lines, strict=False):
        panel.with_target(Dataquery().expr(line.query).legend_format(line.name).ref_id(ref_id))
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
        query = f'max(cleave_gateway_slo_target_seconds{{slo="{target}",{NAMESPACE}}})'
        lines.append(Line("target", query))
    return tuple(lines)
