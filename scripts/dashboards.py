"""Writes Grafana's dashboards: `python scripts/dashboards.py OUTDIR` (scripts/generate).

One function a dashboard, one line a panel: title, unit, and what each of its lines shows. Every
query is asked of a real Prometheus in tests, so a panel cannot be empty for ever.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders.common import VizLegendOptions, VizTooltipOptions
from grafana_foundation_sdk.builders.dashboard import (
    Dashboard,
    DatasourceVariable,
    QueryVariable,
    Row,
)
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH, HEIGHT = 8, 7
"""Three panels side by side."""
_MODEL = 'model=~"$model"'
_RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Line:
    """One query, and what its lines are called."""

    name: str
    query: str


@dataclass(frozen=True, slots=True)
class Graph:
    """One panel."""

    title: str
    unit: str
    lines: tuple[Line, ...]
    text: str = ""
    """What to make of it."""


def serving() -> Dashboard:
    """What clients get."""
    attained = f'cleave_gateway_slo_total{{missed="",{_MODEL}}}'
    answered = f"cleave_gateway_slo_total{{{_MODEL}}}"
    board = _board("serving", "Cleave / Serving", "What clients get, and what they do not.")
    _add(
        board,
        "Targets",
        Graph(
            "SLO attainment",
            "percentunit",
            (Line("{{model}}", f"{_sum(attained, 'model')} / {_sum(answered, 'model')}"),),
            "Share of answers that met both targets. Unserved ones count as missed.",
        ),
        Graph(
            "Goodput",
            "reqps",
            (
                Line("{{model}} in time", _sum(attained, "model")),
                Line("{{model}} all", _sum(answered, "model")),
            ),
            "Answers per second that met both targets, beside all.",
        ),
        Graph(
            "What was missed",
            "reqps",
            (
                Line(
                    "{{missed}}", _sum(f'cleave_gateway_slo_total{{missed!="",{_MODEL}}}', "missed")
                ),
            ),
        ),
    )
    _add(
        board,
        "Latency",
        Graph("Time to first token", "s", _quantiles("cleave_gateway_ttft_seconds", "ttft")),
        Graph("Time per output token", "s", _quantiles("cleave_gateway_tpot_seconds", "tpot")),
        Graph("Gaps between pieces", "s", _quantiles("cleave_gateway_itl_seconds")),
        Graph(
            "P90 to first token by role",
            "s",
            (Line("{{role}}", _quantile(0.9, "cleave_gateway_ttft_seconds", "role")),),
            "By the role of the instance that computed the prompt.",
        ),
        Graph(
            "P90 of each phase",
            "s",
            (Line("{{phase}}", _quantile(0.9, "cleave_gateway_phase_seconds", "phase")),),
            "Of split requests: an instance asked to its first bytes. Decode includes the pull.",
        ),
        Graph("Wait at the gateway", "s", _quantiles("cleave_gateway_queue_seconds")),
    )
    _add(
        board,
        "Traffic",
        Graph(
            "Requests by outcome",
            "reqps",
            (Line("{{outcome}}", _sum(f"cleave_gateway_requests_total{{{_MODEL}}}", "outcome")),),
        ),
        Graph(
            "Tokens",
            "short",
            (
                Line("prompt", _sum(f"cleave_gateway_prompt_tokens_total{{{_MODEL}}}")),
                Line("output", _sum(f"cleave_gateway_output_tokens_total{{{_MODEL}}}")),
            ),
            "Per second.",
        ),
        Graph("In flight", "short", (Line("requests", "sum(cleave_gateway_requests_in_flight)"),)),
        Graph(
            "Dispatch by reason",
            "reqps",
            (Line("{{reason}}", _sum(f"cleave_gateway_dispatches_total{{{_MODEL}}}", "reason")),),
        ),
        Graph(
            "Not taken",
            "reqps",
            (Line("{{reason}} {{tenant}}", _sum("cleave_gateway_shed_total", "reason, tenant")),),
        ),
        Graph(
            "Failures that clients did not see",
            "reqps",
            (
                Line("{{phase}} {{cause}}", _sum("cleave_gateway_retries_total", "phase, cause")),
                Line("{{how}}", _sum("cleave_gateway_recoveries_total", "how")),
            ),
            "Attempts that were made again, and streams that went on with another engine.",
        ),
    )
    return board


def pools() -> Dashboard:
    """Instances, roles, and the KV between them."""
    board = _board("pools", "Cleave / Pools and KV", "Instances, their roles and hand-offs.")
    _add(
        board,
        "Instances",
        Graph(
            "Ready, by role",
            "short",
            (
                Line(
                    "{{model}} {{role}}",
                    f'max by (model, role) (cleave_gateway_instances{{state="ready",{_MODEL}}})',
                ),
            ),
        ),
        Graph(
            "Not ready",
            "short",
            (
                Line(
                    "{{role}} {{state}}",
                    f'max by (role, state) (cleave_gateway_instances{{state!="ready",{_MODEL}}})',
                ),
            ),
        ),
        Graph(
            "Flips in an hour",
            "short",
            (
                Line(
                    "{{from}} to {{to}}",
                    f"sum by (from, to) (increase(cleave_gateway_flips_total{{{_MODEL}}}[1h]))",
                ),
            ),
            "Instances lent to the other pool and taken home.",
        ),
    )
    _add(
        board,
        "Hand-offs",
        Graph(
            "By result",
            "reqps",
            (Line("{{result}}", _sum("cleave_gateway_handoffs_total", "result")),),
            "refused and failed ones cost a prompt computed again, never a wrong token.",
        ),
        Graph(
            "Tokens handed over",
            "short",
            (Line("{{model}}", _sum(f"cleave_gateway_handoff_tokens_total{{{_MODEL}}}", "model")),),
            "Prompt tokens per second.",
        ),
    )
    _add(
        board,
        "Engines",
        Graph(
            "Requests",
            "short",
            (
                Line(
                    "{{role}} {{state}}",
                    f"max by (model, role, state) (cleave_gateway_engine_requests{{{_MODEL}}})",
                ),
            ),
        ),
        Graph(
            "KV memory of the fullest",
            "percentunit",
            (
                Line(
                    "{{model}} {{role}}",
                    f"max by (model, role) (cleave_gateway_engine_kv_usage_max{{{_MODEL}}})",
                ),
            ),
        ),
        Graph(
            "P90 of a hand-off",
            "s",
            (
                Line(
                    "{{model}}",
                    _quantile(
                        0.9,
                        "cleave_gateway_phase_seconds",
                        "model",
                        f'{{phase="decode",{_MODEL}}}',
                    ),
                ),
            ),
            "A decode instance asked to its first byte: the pull of the KV, and a step.",
        ),
    )
    return board


def control() -> Dashboard:
    """The operator and the gateways themselves."""
    board = _board("control", "Cleave / Control plane", "The operator and the gateway processes.")
    _add(
        board,
        "Operator",
        Graph(
            "Reconciles",
            "ops",
            (
                Line(
                    "{{kind}} {{outcome}}",
                    _sum("cleave_operator_reconciles_total", "kind, outcome"),
                ),
            ),
        ),
        Graph(
            "P99 of a reconcile",
            "s",
            (Line("{{kind}}", _quantile(0.99, "cleave_operator_reconcile_seconds", "kind", "")),),
        ),
        Graph("Queue", "short", (Line("objects", "sum(cleave_operator_queue_depth)"),)),
        Graph(
            "Writes",
            "ops",
            (
                Line(
                    "{{action}} {{outcome}}",
                    _sum("cleave_operator_actions_total", "action, outcome"),
                ),
            ),
        ),
        Graph("Leaders", "short", (Line("operators that write", "sum(cleave_operator_leading)"),)),
        Graph("Objects", "short", (Line("{{kind}}", "max by (kind) (cleave_operator_objects)"),)),
    )
    _add(
        board,
        "Gateways",
        Graph(
            "Processes",
            "short",
            (
                Line("that serve", "sum(cleave_gateway_processes)"),
                Line(
                    "replaced in an hour",
                    "sum(increase(cleave_gateway_process_restarts_total[1h]))",
                ),
            ),
        ),
        Graph(
            "CPU",
            "percentunit",
            (
                Line(
                    "{{pod}}",
                    f"sum by (pod) (rate(process_cpu_seconds_total{_RATE}) "
                    "and on (pod, instance) cleave_gateway_processes)",
                ),
            ),
            "Of a core.",
        ),
        Graph(
            "Memory",
            "bytes",
            (
                Line(
                    "{{pod}}",
                    "sum by (pod) (process_resident_memory_bytes "
                    "and on (pod, instance) cleave_gateway_processes)",
                ),
            ),
        ),
    )
    return board


DASHBOARDS = (serving, pools, control)


def main(argv: Sequence[str]) -> int:
    """Write all dashboards into the folder argv[0]; 2 when the usage is wrong."""
    if len(argv) != 1 or not Path(argv[0]).is_dir():
        sys.stderr.write("usage: python scripts/dashboards.py OUTDIR\n")
        return 2
    for make in DASHBOARDS:
        text = JSONEncoder(sort_keys=True, indent=2).encode(make().build())
        (Path(argv[0]) / f"{make.__name__}.json").write_text(text + "\n")
    return 0


def _board(name: str, title: str, text: str) -> Dashboard:
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


def _add(board: Dashboard, title: str, *graphs: Graph) -> None:
    board.with_row(Row(title))
    for graph in graphs:
        board.with_panel(_panel(graph))


def _panel(graph: Graph) -> Panel:
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


def _sum(counter: str, labels: str = "") -> str:
    """Per second."""
    by = f" by ({labels})" if labels else ""
    return f"sum{by} (rate({counter}{_RATE}))"


def _quantile(share: float, histogram: str, labels: str = "", of: str = f"{{{_MODEL}}}") -> str:
    by = f"le, {labels}" if labels else "le"
    return f"histogram_quantile({share}, sum by ({by}) (rate({histogram}_bucket{of}{_RATE})))"


def _quantiles(histogram: str, target: str = "") -> tuple[Line, ...]:
    lines = [Line(f"P{s * 100:.0f}", _quantile(s, histogram)) for s in (0.5, 0.9, 0.99)]
    if target:
        query = f'max(cleave_gateway_slo_target_seconds{{slo="{target}"}})'
        lines.append(Line("target", query))
    return tuple(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
