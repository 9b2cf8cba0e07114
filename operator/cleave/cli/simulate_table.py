"""Simulations on a terminal, as JSON, and request by request as CSV."""

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from cleave.cli.tables import plain_table, print_whole
from cleave.planner.digest import Digest, InstanceLoad
from cleave.planner.plan import Percentiles
from cleave.planner.words import milliseconds, number, percent
from cleave.simulator.breakdown import Stage, stage_ms

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cleave.api.deployment import Slo
    from cleave.simulator.outcome import Outcome

_MOST_INSTANCES = 16
_STAGE_FIELDS = {
    Stage.PREFILL_QUEUE: "prefill_queue_ms",
    Stage.PREFILL: "prefill_ms",
    Stage.TRANSFER: "transfer_ms",
    Stage.DECODE_QUEUE: "decode_queue_ms",
    Stage.DECODE: "decode_ms",
}


def show_one(console: "Console", seen: Digest, slo: "Slo") -> None:
    """Print latencies, attainment, stages and instances of one rate."""
    console.print(
        f"{seen.num_requests:,} requests at {number(seen.rate)} req/s: "
        f"{percent(seen.attainment)} within TTFT {milliseconds(slo.ttft_ms)} and TPOT "
        f"{milliseconds(slo.tpot_ms)} (goal {percent(slo.attainment)}); TTFT alone "
        f"{percent(seen.ttft_attainment)}, TPOT alone {percent(seen.tpot_attainment)}",
        highlight=False,
        soft_wrap=True,
    )
    for sentence in _losses(seen):
        console.print(sentence, style="red", highlight=False, soft_wrap=True)
    for drawn in (_latencies(seen), _stages(seen), _instances(seen)):
        print_whole(console, drawn)
    if (left := len(seen.instances) - _MOST_INSTANCES) > 0:
        console.print(f"... and {left} more instances (-o json has all)", highlight=False)


def show_many(console: "Console", found: Sequence[Digest], slo: "Slo") -> None:
    """Print a line per rate."""
    headings = ("RATE", "ATTAINED", "TTFT P50", "P90", "P99", "TPOT P50", "P90", "P99", "BUSIEST")
    drawn = plain_table((), headings)
    for seen in found:
        style = None if seen.attainment >= slo.attainment else "red"
        drawn.add_row(
            number(seen.rate),
            percent(seen.attainment),
            *_three(seen.ttft_ms),
            *_three(seen.tpot_ms),
            percent(max(each.busy for each in seen.instances)),
            style=style,
        )
    print_whole(console, drawn)
    targets = f"TTFT {milliseconds(slo.ttft_ms)}, TPOT {milliseconds(slo.tpot_ms)}"
    goal = f"goal: {percent(slo.attainment)} within {targets}"
    console.print(f"{goal}; rates that miss it are red", style="dim", highlight=False)


def document(found: Sequence[Digest]) -> list[dict[str, Any]]:
    """The figures of every rate, ready for JSON; what is not finite is null."""
    return [_finite(asdict(seen)) for seen in found]


def write_csv(file: TextIO, outcome: "Outcome", names: Sequence[str]) -> None:
    """A line per request, in order of arrival; empty: never reached."""
    stages = stage_ms(outcome)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(
        (
            *("arrival_ms", "ttft_ms", "tpot_ms", "end_ms", "output_tokens"),
            *_STAGE_FIELDS.values(),
            *("prefill_instance", "decode_instance", "preemptions"),
        )
    )
    columns = (outcome.arrival_ms, outcome.ttft_ms, outcome.tpot_ms, outcome.end_ms)
    for index in range(len(outcome.arrival_ms)):
        writer.writerow(
            [
                *(_cell(column[index]) for column in columns),
                int(outcome.output_tokens[index]),
                *(_cell(stages[stage][index]) for stage in _STAGE_FIELDS),
                *(_name(names, outcome.prefill_instance[index]),),
                *(_name(names, outcome.decode_instance[index]),),
                int(outcome.num_preemptions[index]),
            ]
        )


def _losses(seen: Digest) -> Iterator[str]:
    if seen.num_too_long:
        yield f"{seen.num_too_long:,} requests fit no instance: their KV is too long"
    if seen.num_unfinished:
        yield f"{seen.num_unfinished:,} requests never ended: they waited for room for ever"


def _latencies(seen: Digest) -> "Table":
    drawn = plain_table(("LATENCY",), ("P50", "P90", "P99"))
    rows = (("TTFT", seen.ttft_ms), ("TPOT", seen.tpot_ms), ("arrival to end", seen.latency_ms))
    for name, latency in rows:
        drawn.add_row(name, *_three(latency))
    return drawn


def _stages(seen: Digest) -> "Table":
    drawn = plain_table(("STAGE",), ("MEAN", "SHARE"))
    for each in seen.stages:
        drawn.add_row(str(each.stage), milliseconds(each.mean_ms), f"{each.share:.1%}")
    return drawn


def _instances(seen: Digest) -> "Table":
    drawn = plain_table(
        ("INSTANCE",), ("BUSY", "MFU", "PASSES", "BATCH", "KV MEAN", "KV PEAK", "PREEMPTIONS")
    )
    for each in seen.instances[:_MOST_INSTANCES]:
        drawn.add_row(*_load(each))
    return drawn


def _load(each: InstanceLoad) -> Iterator[str]:
    yield each.name
    yield percent(each.busy)
    yield "-" if math.isnan(each.mfu) else percent(each.mfu)
    yield f"{each.passes:,}"
    yield number(each.mean_batch)
    yield percent(each.kv_usage)
    yield percent(each.kv_peak)
    yield f"{each.preemptions:,}"


def _three(latency: Percentiles) -> tuple[str, str, str]:
    return milliseconds(latency.p50), milliseconds(latency.p90), milliseconds(latency.p99)


def _finite(value: Any) -> Any:  # noqa: ANN401 - JSON has no narrower type
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def _name(names: Sequence[str], index: int) -> str:
    return names[index] if index >= 0 else ""
