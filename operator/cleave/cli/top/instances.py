"""The table of instances of `cleave top`, fitted to the screen.

When rows do not fit, instances that need attention are shown first; when columns do not fit, the
least important ones are dropped.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

from cleave.cli.top.view import is_flipped
from cleave.rpc.fleet_status import FleetInstance, FleetStatus

_GAP = 2
"""Cells between two columns."""
_BAR_CELLS = 10
_FULL_USAGE = 0.9
"""Used share of the KV cache from which the bar is red."""
_HIT_TOLERANCE = 0.1
"""Difference of predicted and real hit shares that is not shown, as in the alert."""
_CONNECTED = ("", "fresh")
_STYLES = dict.fromkeys(("starting", "draining", "stale"), "yellow")
_STYLES |= {"ready": "green", "verifying": "cyan"}


def make_table() -> Table:
    """A dense table without lines."""
    return Table(box=None, pad_edge=False, padding=(0, _GAP // 2), header_style="bold")


def get_state(instance: FleetInstance) -> str:
    """The state that its agent reports, or the connection state if the agent does not respond."""
    return instance.state if instance.contact in _CONNECTED else instance.contact


def select_instances(fleet: FleetStatus, rows: int) -> tuple[Sequence[FleetInstance], int]:
    """The instances to show in `rows` lines, and the number of omitted ones (the last line).
    Ordered by name when all fit; else the most urgent ones first."""
    instances, left_out = fleet.instances, fleet.left_out
    if len(instances) + bool(left_out) <= rows:
        return instances, left_out
    shown = sorted(instances, key=_compute_urgency, reverse=True)[: rows - 1]
    return shown, left_out + len(instances) - len(shown)


def build_instance_table(instances: Sequence[FleetInstance], width: int | None = None) -> Table:
    """A row per instance, at most `width` cells wide; None: as wide as needed."""
    columns = list(_COLUMNS)
    cells = {column.heading: [column.cell(each) for each in instances] for column in columns}
    while width is not None and _measure(columns, cells) > width:
        optional = [column for column in columns if column.drop_order]
        if not optional:
            break
        columns.remove(min(optional, key=lambda column: column.drop_order))
    table = make_table()
    for column in columns:
        table.add_column(column.heading, justify=column.justify, no_wrap=True)
    for row in zip(*(cells[column.heading] for column in columns), strict=True):
        table.add_row(*row)
    return table


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    cell: Callable[[FleetInstance], Text]
    justify: Literal["left", "right"] = "right"
    drop_order: int = 0
    """Order in which columns are dropped when there is no room, from 1; 0: never."""


def _measure(columns: Sequence[_Column], cells: dict[str, list[Text]]) -> int:
    widths = (
        max(len(column.heading), *(cell.cell_len for cell in cells[column.heading]), 0)
        for column in columns
    )
    return sum(widths) + _GAP * (len(columns) - 1)


def _compute_urgency(instance: FleetInstance) -> tuple[bool, bool, float, float]:
    needs_attention = get_state(instance) != "ready", is_flipped(instance)
    return *needs_attention, instance.kv_cache_usage, instance.pending_tokens


def _describe_role(instance: FleetInstance) -> Text:
    if is_flipped(instance):
        return Text(f"{instance.home}→{instance.role}", style="bold yellow")
    return Text(instance.role)


def _describe_state(instance: FleetInstance) -> Text:
    state = get_state(instance)
    return Text(state, style=_STYLES.get(state, "red"))


def _draw_bar(instance: FleetInstance) -> Text:
    used = min(max(instance.kv_cache_usage, 0.0), 1.0)
    # Rounded up, so that any use is visible.
    filled = min(round(used * _BAR_CELLS + 0.499), _BAR_CELLS)
    bar = Text("█" * filled, style="red" if used >= _FULL_USAGE else "cyan")
    return bar.append("░" * (_BAR_CELLS - filled), style="dim")


def _describe_hits(instance: FleetInstance) -> Text:
    """The engine's share of cached prompt tokens, and the predicted one where that differs."""
    engine, predicted = instance.cache_hits.engine, instance.cache_hits.predicted
    if engine is None:
        return Text("")
    shown = f"{engine * 100:.0f}"
    if predicted is None or abs(predicted - engine) <= _HIT_TOLERANCE:
        return Text(shown)
    return Text(f"{shown} not {predicted * 100:.0f}", style="yellow")


def _describe_path(instance: FleetInstance) -> Text:
    path = instance.kv_path
    if not path.verified:
        return Text("not verified", style="yellow")
    speed = f" {path.bytes_per_s / 1e9:.2g} GB/s" if path.bytes_per_s else ""
    pairs = instance.kv_pairs
    proven = f", {pairs.proven}/{pairs.total} pairs" if pairs.total else ""
    return Text(f"{path.transport}{speed}{proven}", style="yellow" if pairs.num_closed else "")


_COLUMNS = (
    _Column("INSTANCE", lambda each: Text(each.name), justify="left"),
    _Column("ROLE", _describe_role, justify="left"),
    _Column("STATE", _describe_state, justify="left"),
    _Column("RUN", lambda each: Text(str(each.num_running))),
    _Column("WAIT", lambda each: Text(str(each.num_waiting))),
    _Column("PENDING", lambda each: Text(f"{each.pending_tokens:,}"), drop_order=5),
    _Column("KV%", lambda each: Text(f"{each.kv_cache_usage:.0%}"[:-1])),
    _Column("KV", _draw_bar, justify="left", drop_order=3),
    _Column("HIT%", _describe_hits, drop_order=6),
    _Column("HERE", lambda each: Text(str(each.requests_in_flight)), drop_order=4),
    _Column("AGE s", lambda each: Text(f"{each.report_age_s:.1f}"), drop_order=2),
    _Column("KV PATH", _describe_path, justify="left", drop_order=1),
)
