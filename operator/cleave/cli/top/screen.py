"""The screen of `cleave top`: traffic per time window above, a row per instance below."""

import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from cleave.cli.output.tables import print_full_width
from cleave.cli.top import instances
from cleave.cli.top.instances import get_state, make_table
from cleave.cli.top.view import MINUTE_S, NOW_S, TopView
from cleave.rpc.weights_report import WeightsReport, explain_weights
from cleave.traffic.counters import GatewayCounters, TrafficRates

_HEADER_ROWS = 5
_MIN_ROWS = 3
_MAX_REASONS = 3
_NO_VALUE = "-"
_FULLY_MEASURED = 0.995
"""Share of measured requests from which nothing is said of the others."""


def render_screen(view: TopView, width: int, height: int) -> Group:
    """The view, fitted into `width` x `height` cells as far as possible."""
    notes, traffic = _describe_events(view), _draw_traffic(view)
    # Both tables have headings.
    taken = _HEADER_ROWS + traffic.row_count + len(notes) + 2
    shown, more = instances.select_instances(view.fleet, max(_MIN_ROWS, height - taken))
    return Group(
        *_truncate(_describe_state(view), width),
        Text(),
        traffic,
        *_truncate([_describe_counts(view)], width),
        Text(),
        instances.build_instance_table(shown, width),
        *_truncate([*_describe_omitted(more), *notes], width),
    )


def print_plain(console: Console, view: TopView) -> None:
    """Print the view without fitting it to the terminal."""

    def print_texts(texts: Sequence[Text]) -> None:
        for text in texts:
            console.print(text, soft_wrap=True)

    print_texts(_describe_state(view))
    print_full_width(console, _draw_traffic(view))
    print_texts([_describe_counts(view), Text()])
    print_full_width(console, instances.build_instance_table(view.fleet.instances))
    print_texts([*_describe_omitted(view.fleet.left_out), *_describe_events(view), Text()])


def _truncate(texts: Sequence[Text], width: int) -> Sequence[Text]:
    for text in texts:
        text.truncate(width, overflow="ellipsis")
    return texts


def _describe_state(view: TopView) -> list[Text]:
    head = Text(", ".join(view.deployments) or "no instances", style="bold")
    head.append(f"  {', '.join(view.models)}", style="not bold")
    clock = time.strftime("%H:%M:%S", time.localtime(view.at))
    if view.fault:
        return [head, Text(f"{clock}  no response since then: {view.fault}", style="red")]
    fleet, counts = view.fleet, view.counts
    ready = sum(get_state(each) == "ready" for each in fleet.instances)
    now = (
        f"{clock}  in flight {counts.in_flight:.0f}  waiting {counts.waiting:.0f}"
        f"  instances ready {ready} of {len(fleet.instances) + fleet.left_out}"
    )
    return [head, Text(f"{now}  this gateway is draining" if fleet.draining else now)]


def _draw_traffic(view: TopView) -> Table:
    table = make_table()
    table.add_column("WINDOW", no_wrap=True)
    traffic_headings = ("REQ/S", "TOK/S", "ATTAINED", "GOODPUT")
    for heading in (*traffic_headings, "TTFT P50", "P90 ms", "TPOT P50", "P90 ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    windows = {_format_window(view.minute, MINUTE_S): view.minute}
    # At first both windows reach back to the first poll: they are one row then.
    windows = {_format_window(view.now, NOW_S): view.now} | windows
    for name, traffic in windows.items():
        table.add_row(*_describe_window(name, traffic, view.counts))
    table.add_row(*_describe_window("all", view.total, view.counts))
    ttft, tpot = map(_format_figure, (view.counts.ttft_target_ms, view.counts.tpot_target_ms))
    table.add_row("target", *[""] * 5, ttft, "", tpot, style="dim")
    return table


def _describe_window(name: str, rates: TrafficRates | None, counts: GatewayCounters) -> list[Text]:
    if rates is None:
        return [Text(name), *(Text(_NO_VALUE) for _ in range(8))]
    share = rates.slo_attainment
    return [
        Text(name),
        Text(_format_figure(rates.requests_per_s)),
        Text(f"{rates.output_tokens_per_s:,.0f}"),
        Text(_NO_VALUE if share is None else f"{share:.1%}"),
        Text(_format_figure(rates.goodput)),
        Text(_format_figure(rates.ttft_p50_ms)),
        _color_by_target(rates.ttft_p90_ms, counts.ttft_target_ms),
        Text(_format_figure(rates.tpot_p50_ms)),
        _color_by_target(rates.tpot_p90_ms, counts.tpot_target_ms),
    ]


def _color_by_target(value_ms: float | None, target_ms: float | None) -> Text:
    if value_ms is None or target_ms is None:
        return Text(_format_figure(value_ms))
    return Text(_format_figure(value_ms), style="red" if value_ms > target_ms else "green")


def _describe_counts(view: TopView) -> Text:
    """Counts of rejections, retries, recoveries and role flips, of the last minute and in total."""
    line = Text()
    minute, ever = view.minute, view.counts
    for name, recent, total in (
        ("shed", minute and minute.shed, ever.shed),
        ("retried", minute and minute.retries, ever.retries),
        ("recovered", minute and minute.recoveries, ever.recoveries),
        ("flips", minute and minute.flips, ever.flips),
    ):
        line.append(f"{name} {recent or 0}", style="yellow" if recent else "")
        line.append(f" (total {total:.0f})  ", style="dim")
    return line.append(f"in {_format_window(minute, MINUTE_S)}", style="dim")


def _describe_omitted(more: int) -> list[Text]:
    return [Text(f"and {more} more", style="dim")] if more else []


def _describe_events(view: TopView) -> list[Text]:
    """Requests that are not measured, reasons why instances are not ready, changes of roles."""
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
    notes = _describe_unmeasured(view) + _describe_weights(view) + reasons[:_MAX_REASONS] + changes
    return [Text(), *notes] if notes else []


def _describe_unmeasured(view: TopView) -> list[Text]:
    """A line where ATTAINED and GOODPUT are not of all requests of a window."""
    windows = [traffic for traffic in (view.minute, view.total) if traffic]
    shares = [each.measured_share for each in windows if each.measured_share is not None]
    share = min(shares, default=1.0)
    has_targets = view.counts.ttft_target_ms or view.counts.tpot_target_ms
    if share > _FULLY_MEASURED or not has_targets:
        return []
    why = "responses that are not streamed have no time to the first token"
    return [Text(f"ATTAINED and GOODPUT are of {share:.0%} of the requests: {why}", style="dim")]


def _describe_weights(view: TopView) -> list[Text]:
    """A line for each deployment whose instances have loaded different weights."""
    lines = []
    for deployment in view.deployments:
        found = [
            WeightsReport(each.name, each.weights, each.weights_read_s, each.weights_fault)
            for each in view.fleet.instances
            if each.deployment == deployment
        ]
        if text := explain_weights(found):
            lines.append(Text(text, style="yellow"))
    return lines


def _format_window(traffic: TrafficRates | None, window_s: float) -> str:
    seconds = traffic.window_s if traffic else window_s
    return f"{seconds:.0f} s" if seconds >= 2 else f"{seconds:.1f} s"


def _format_figure(value: float | None) -> str:
    if value is None:
        return _NO_VALUE
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
