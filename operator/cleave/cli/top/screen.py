"""The screen of `cleave top`: traffic per time window above, a row per instance below."""

import time
from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from cleave.cli.output.tables import print_whole
from cleave.cli.top import instances
from cleave.cli.top.instances import find_state, make_table
from cleave.cli.top.view import MINUTE_S, NOW_S, View
from cleave.traffic.counters import Traffic

_TEXTS_ABOVE = 5
_TRAFFIC_ROWS = 5
_LEAST_ROWS = 3
_REASONS = 3
_NOTHING = "-"


def to_screen(view: View, width: int, height: int) -> Group:
    """The view, fitted into `width` x `height` cells as far as possible."""
    notes = _describe_notes(view)
    taken = _TEXTS_ABOVE + _TRAFFIC_ROWS + len(notes) + 1  # the headings of instances
    shown, more = instances.choose(view.fleet, max(_LEAST_ROWS, height - taken))
    return Group(
        *_cut(_describe_state(view), width),
        Text(),
        _draw_traffic(view),
        *_cut([_describe_counts(view)], width),
        Text(),
        instances.draw(shown, width),
        *_cut([*_count_more(more), *notes], width),
    )


def print_plain(console: Console, view: View) -> None:
    """Print the view without fitting it to the terminal."""

    def print_texts(texts: Sequence[Text]) -> None:
        for text in texts:
            console.print(text, soft_wrap=True)

    print_texts(_describe_state(view))
    print_whole(console, _draw_traffic(view))
    print_texts([_describe_counts(view), Text()])
    print_whole(console, instances.draw(view.fleet.instances))
    print_texts([*_count_more(view.fleet.left_out), *_describe_notes(view), Text()])


def _cut(texts: Sequence[Text], width: int) -> Sequence[Text]:
    for text in texts:
        text.truncate(width, overflow="ellipsis")
    return texts


def _describe_state(view: View) -> list[Text]:
    head = Text(", ".join(view.deployments) or "no instances", style="bold")
    head.append(f"  {', '.join(view.models)}", style="not bold")
    clock = time.strftime("%H:%M:%S", time.localtime(view.at))
    if view.fault:
        return [head, Text(f"{clock}  no response since then: {view.fault}", style="red")]
    fleet, counts = view.fleet, view.counts
    ready = sum(find_state(each) == "ready" for each in fleet.instances)
    now = (
        f"{clock}  in flight {counts.in_flight:.0f}  waiting {counts.waiting:.0f}"
        f"  instances ready {ready} of {len(fleet.instances) + fleet.left_out}"
    )
    return [head, Text(f"{now}  this gateway is draining" if fleet.draining else now)]


def _draw_traffic(view: View) -> Table:
    drawn = make_table()
    drawn.add_column("WINDOW", no_wrap=True)
    for heading in ("REQ/S", "TOK/S", "ATTAINED", "GOODPUT"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for heading in ("TTFT P50", "P90 ms", "TPOT P50", "P90 ms"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    ttft_target_ms, tpot_target_ms = view.counts.ttft_target_ms, view.counts.tpot_target_ms
    for traffic, window_s in ((view.now, NOW_S), (view.minute, MINUTE_S)):
        drawn.add_row(
            *_describe_window(_seconds(traffic, window_s), traffic, ttft_target_ms, tpot_target_ms)
        )
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
    """Counts of rejections, retries, recoveries and role flips, of the last minute and in total."""
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
    return line.append(f"({MINUTE_S:.0f} s, total)", style="dim")


def _count_more(more: int) -> list[Text]:
    return [Text(f"and {more} more", style="dim")] if more else []


def _describe_notes(view: View) -> list[Text]:
    """Reasons why instances are not ready, and the last changes of roles."""
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


def _seconds(traffic: Traffic | None, window_s: float) -> str:
    seconds = traffic.window_s if traffic else window_s
    return f"{seconds:.0f} s" if seconds >= 2 else f"{seconds:.1f} s"


def _rate(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _ms(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"
