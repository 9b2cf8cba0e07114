"""Builders of Grafana dashboards: queries, panels, rows. Used by dashboards.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from string import ascii_uppercase

from grafana_foundation_sdk.builders import heatmap, stat, table, timeseries
from grafana_foundation_sdk.builders.common import (
    ReduceDataOptions,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DashboardLink,
    DatasourceVariable,
    QueryVariable,
    Row,
    ThresholdsConfig,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataSourceRef,
    DataTransformerConfig,
    Threshold,
    ThresholdsMode,
    VariableRefresh,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
ROW_WIDTH = 24
"""Of Grafana's grid."""
HEIGHT, STAT_HEIGHT = 7, 4
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


class Kind(Enum):
    """How a panel shows its series."""

    LINES = "timeseries"
    NUMBERS = "stat"
    """The last values, in front of their lines."""
    TABLE = "table"
    """A row for each series, with its labels and last value."""
    BUCKETS = "heatmap"
    """How many observations of a histogram lie in which bucket."""


Panel = timeseries.Panel | stat.Panel | table.Panel | heatmap.Panel


@dataclass(frozen=True, slots=True)
class Graph:
    """One panel."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    text: str
    """Description: what it shows, and what to look for."""
    decimals: int | None = None
    """Of the axis and the values; None: as many as they need."""
    kind: Kind = Kind.LINES
    limits: tuple[tuple[float, str], ...] = ()
    """Of numbers: from which value on they have which color; below the first they are green."""


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
    """Add a row of panels, three side by side, or four where all are numbers."""
    dashboard.with_row(Row(title))
    are_numbers = all(graph.kind is Kind.NUMBERS for graph in graphs)
    for graph in graphs:
        panel = _make_panel(graph)
        panel.title(graph.title).description(graph.text).unit(graph.unit).min(0).datasource(SOURCE)
        panel.span(ROW_WIDTH // (4 if are_numbers else 3))
        panel.height(STAT_HEIGHT if are_numbers else HEIGHT)
        if graph.decimals is not None:
            panel.decimals(graph.decimals)
        for ref_id, line in zip(ascii_uppercase, graph.lines, strict=False):
            panel.with_target(_make_query(graph.kind, line).ref_id(ref_id))
        dashboard.with_panel(panel)


def _make_panel(graph: Graph) -> Panel:
    """A panel of the graph's kind, without what all kinds have."""
    match graph.kind:
        case Kind.NUMBERS:
            return (
                stat.Panel()
                .graph_mode(BigValueGraphMode.AREA)
                .color_mode(BigValueColorMode.VALUE if graph.limits else BigValueColorMode.NONE)
                .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
                .thresholds(_make_limits(graph.limits))
            )
        case Kind.TABLE:
            hidden = {"excludeByName": {"Time": True}}
            without_time = DataTransformerConfig(id_val="organize", options=hidden)
            return table.Panel().show_header(True).with_transformation(without_time)
        case Kind.BUCKETS:
            return heatmap.Panel().y_axis(heatmap.YAxisConfig().unit(graph.unit))
        case Kind.LINES:
            return (
                timeseries.Panel()
                .fill_opacity(8)
                .legend(
                    VizLegendOptions()
                    .display_mode(LegendDisplayMode.LIST)
                    .placement(LegendPlacement.BOTTOM)
                    .show_legend(True)
                )
                .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI))
            )


def _make_query(kind: Kind, line: Line) -> Dataquery:
    query = Dataquery().expr(line.query).legend_format(line.name)
    if kind is Kind.TABLE:
        query.instant().format(PromQueryFormat.TABLE)
    elif kind is Kind.BUCKETS:
        query.format(PromQueryFormat.HEATMAP)
    return query


def _make_limits(limits: Sequence[tuple[float, str]]) -> ThresholdsConfig:
    steps = [Threshold(None, "green"), *(Threshold(value, color) for value, color in limits)]
    return ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps)


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
