"""What `cleave top` draws: windows of traffic above, a line per instance below.

What is hard: it has to fit. Instances that are not well stay on a screen that is too low for all,
and columns go one by one, the least telling first, from one that is too narrow.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from cleave.cli.tables import print_whole
from cleave.cli.top_view import MINUTE_S, NOW_S, View, is_away
from cleave.rpc.fleet_page import Instance
from cleave.traffic.counts import Traffic

_BAR_CELLS = 10
_FULL = 0.9
"""Share of the KV cache from which an instance is shown as full."""
_GAP = 2
_REASONS = 3
_LEAST_ROWS = 3
_NOTHING = "-"
_HEARD = ("", "heard")
_STYLES = {"ready": "green", "starting": "yellow", "verifying": "cyan", "draining": "yellow"}


def to_screen(view: View, width: int, height: int) -> Group:
    """All of it within `width` x `height` cells, as far as that can be done."""
    notes = _describe_notes(view)
    counts = _describe_counts(view)
    above: list[Text | Table] = [
        *_describe_state(view),
        Text(),
        _draw_traffic(view),
        counts,
        Text(),
    ]
    # The table of traffic has five lines, that of instances a heading.
    rows = max(_LEAST_ROWS, height - len(above) - 4 - 1 - len(notes))
    for line in (*above, *notes):
        if isinstance(line, Text):
            line.truncate(width, overflow="ellipsis")
    return Group(*above, _draw_instances(view, rows, width), *notes)


def print_plain(console: Console, view: View) -> None:
    """All of it, as wide and long as it is."""
    for line in _describe_state(view):
        console.print(line, soft_wrap=True)
    print_whole(console, _draw_traffic(view))
    console.print(_describe_counts(view), soft_wrap=True)
    console.print()
    print_whole(console, _draw_instances(view, len(view.fleet.instances)))
    for note in _describe_notes(view):
        console.print(note, soft_wrap=True)
    console.print()


def _describe_state(view: View) -> list[Text]:
    fleet = view.fleet
    ready = sum(each.state == "ready" and each.contact in _HEARD for each in fleet.instances)
    clock = time.strftime("%H:%M:%S", time.localtime(view.at))
    head = Text(", ".join(view.deployments) or "no instances", style="bold")
    head.append(f"  {', '.join(view.models)}", style="not bold")
    now = (
        f"{clock}  in flight {view.counts.in_flight:.0f}  waiting {view.counts.waiting:.0f}"
        f"  instances ready {ready} of {len(fleet.instances) + fleet.left_out}"
    )
    if view.fault:
        return [head, Text(f"{now}  no answer since then: {view.fault}", style="red")]
    return [head, Text(f"{now}  this gateway drains" if fleet.draining else now)]


def _draw_traffic(view: View) -> Table:
    drawn = _make_table("WINDOW")
    for heading in ("REQ/S", "TOK/S", "ATTAINED", "GOODPUT"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for heading in ("TTFT P50", "P90 ms", "TPOT P50", "P90 ms"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    ttft_target_ms, tpot_target_ms = view.counts.ttft_target_ms, view.counts.tpot_target_ms
    for traffic, window_s in ((view.now, NOW_S), (view.minute, MINUTE_S)):
        name = f"{traffic.window_s if traffic else window_s:.0f} s"
        drawn.add_row(*_describe_window(name, traffic, ttft_target_ms, tpot_target_ms))
    drawn.add_row(*_describe_window("all", view.ever, ttft_target_ms, tpot_target_ms))
    targets = _ms(ttft_target_ms), "", _ms(tpot_target_ms)
    drawn.add_row("target", *[""] * 5, *targets, style="dim")
    return drawn


def _describe_window(
    name: str, traffic: Traffic | None, ttft_target_ms: float | None, tpot_target_ms: float | None
) -> list[Text]:
    if traffic is None:
        return [Text(name), *(Text(_NOTHING) for _ in range(8))]
    share = traffic.slo_attainment
    return [
        Text(name),
        Text(_rate(traffic.requests_per_s)),
        Text(f"{traffic.output_tokens_per_s:,.0f}"),
        Text(_NOTHING if share is None else f"{share:.1%}"),
        Text(_NOTHING if traffic.goodput is None else _rate(traffic.goodput)),
        Text(_ms(traffic.ttft_p50_ms)),
        _judge(traffic.ttft_p90_ms, ttft_target_ms),
        Text(_ms(traffic.tpot_p50_ms)),
        _judge(traffic.tpot_p90_ms, tpot_target_ms),
    ]


def _judge(value_ms: float | None, target_ms: float | None) -> Text:
    if value_ms is None or target_ms is None:
        return Text(_ms(value_ms))
    return Text(_ms(value_ms), style="red" if value_ms > target_ms else "green")


def _describe_counts(view: View) -> Text:
    """How often something went wrong or changed."""
    line = Text()
    minute, ever = view.minute, view.counts
    for name, recent, total in (
        ("shed", minute and minute.shed, ever.shed),
        ("retried", minute and minute.retries, ever.retries),
        ("recovered", minute and minute.recoveries, ever.recoveries),
        ("flips", minute and minute.flips, ever.flips),
    ):
        shown = f"{name} {recent or 0} of {total:.0f}"
        line.append(shown, style="yellow" if recent else "").append("  ")
    return line.append(f"({MINUTE_S:.0f} s, of all)", style="dim")


@dataclass(frozen=True, slots=True)
class _Column:
    """One column of the instances."""

    heading: str
    cell: Callable[[Instance], Text]
    is_figure: bool = True
    leaves: int = 0
    """Its turn to go where there is no room, from 1; 0: never."""


def _draw_instances(view: View, rows: int, width: int | None = None) -> Table:
    """At most `rows` lines, those first that somebody should look at; None: as wide as it is."""
    shown, more = list(view.fleet.instances), view.fleet.left_out
    if len(shown) + bool(more) > rows:
        shown.sort(key=_find_urgency, reverse=True)
        more += len(shown) - (rows - 1)
        shown = shown[: rows - 1]
    columns = list(_COLUMNS)
    cells = {column.heading: [column.cell(each) for each in shown] for column in columns}
    while width is not None and _measure(columns, cells) > width:
        going = [column for column in columns if column.leaves]
        if not going:
            break
        columns.remove(min(going, key=lambda column: column.leaves))
    drawn = _make_table()
    for column in columns:
        drawn.add_column(
            column.heading, justify="right" if column.is_figure else "left", no_wrap=True
        )
    for row in zip(*(cells[column.heading] for column in columns), strict=True):
        drawn.add_row(*row)
    if more:
        drawn.add_row(Text(f"and {more} more", style="dim"))
    return drawn


def _measure(columns: Sequence[_Column], cells: dict[str, list[Text]]) -> int:
    widths = (
        max((len(column.heading), *(cell.cell_len for cell in cells[column.heading])))
        for column in columns
    )
    return sum(widths) + _GAP * (len(columns) - 1)


def _find_urgency(instance: Instance) -> tuple[bool, bool, float, float]:
    return (
        _find_state(instance) != "ready",
        is_away(instance),
        instance.kv_cache_usage,
        instance.pending_tokens,
    )


def _find_state(instance: Instance) -> str:
    """Its own word, unless it is not heard."""
    return instance.state if instance.contact in _HEARD else instance.contact


def _describe_role(instance: Instance) -> Text:
    if is_away(instance):
        return Text(f"{instance.home}→{instance.role}", style="bold yellow")
    return Text(instance.role)


def _describe_instance_state(instance: Instance) -> Text:
    state = _find_state(instance)
    return Text(state, style=_STYLES.get(state, "red"))


def _draw_bar(instance: Instance) -> Text:
    used = min(max(instance.kv_cache_usage, 0.0), 1.0)
    filled = min(_BAR_CELLS, round(used * _BAR_CELLS + 0.499))  # a little is seen as well
    bar = Text("█" * filled, style="red" if used >= _FULL else "cyan")
    return bar.append("░" * (_BAR_CELLS - filled), style="dim")


def _describe_path(instance: Instance) -> Text:
    path = instance.kv_path
    if not path.verified:
        return Text("not verified", style="yellow")
    speed = f" {path.bytes_per_s / 1e9:.2g} GB/s" if path.bytes_per_s else ""
    return Text(f"{path.transport}{speed}")


_COLUMNS = (
    _Column("INSTANCE", lambda each: Text(each.name), is_figure=False),
    _Column("ROLE", _describe_role, is_figure=False),
    _Column("STATE", _describe_instance_state, is_figure=False),
    _Column("RUN", lambda each: Text(str(each.num_running))),
    _Column("WAIT", lambda each: Text(str(each.num_waiting))),
    _Column("PENDING", lambda each: Text(f"{each.pending_tokens:,}"), leaves=5),
    _Column("KV%", lambda each: Text(f"{each.kv_cache_usage:.0%}"[:-1])),
    _Column("KV", _draw_bar, is_figure=False, leaves=3),
    _Column("HERE", lambda each: Text(str(each.requests_in_flight)), leaves=4),
    _Column("AGE s", lambda each: Text(f"{each.report_age_s:.1f}"), leaves=2),
    _Column("KV PATH", _describe_path, is_figure=False, leaves=1),
)


def _describe_notes(view: View) -> list[Text]:
    """Why instances are not ready, and which roles changed last."""
    reasons = [
        Text(f"{each.name}: {each.reason}", style="yellow")
        for each in view.fleet.instances
        if each.reason
    ]
    changes = [
        Text(f"{time.strftime('%H:%M:%S', time.localtime(each.at))}  {each.instance}: ").append(
            f"{each.before} → {each.role}", style="bold"
        )
        for each in view.changes
    ]
    notes = reasons[:_REASONS] + changes
    return [Text(), *notes] if notes else []


def _make_table(*texts: str) -> Table:
    drawn = Table(box=None, pad_edge=False, padding=(0, _GAP // 2), header_style="bold")
    for heading in texts:
        drawn.add_column(heading, no_wrap=True)
    return drawn


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _ms(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
