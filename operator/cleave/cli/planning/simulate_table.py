"""Results of simulations as terminal tables, as JSON, and per request as CSV."""

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TextIO

from cleave.cli.output.tables import plain_table, print_whole
from cleave.planner.plan import Percentiles
from cleave.planner.result.simulation_summary import Digest, InstanceLoad
from cleave.planner.result.text import milliseconds, number, percent
from cleave.simulator.latency_breakdown import Stage, stage_ms

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


def show_one(console: "Console", result: Digest, slo: "Slo") -> None:
    """Print latencies, SLO attainment, stages and instances at one rate."""
    console.print(
        f"{result.num_requests:,} requests at {number(result.rate)} req/s: "
        f"{percent(result.attainment)} within TTFT {milliseconds(slo.ttft_ms)} and TPOT "
        f"{milliseconds(slo.tpot_ms)} (target {percent(slo.attainment)}); TTFT alone "
        f"{percent(result.ttft_attainment)}, TPOT alone {percent(result.tpot_attainment)}",
        highlight=False,
        soft_wrap=True,
    )
    for sentence in _losses(result):
        console.print(sentence, style="red", highlight=False, soft_wrap=True)
    for drawn in (_latencies(result), _stages(result), _instances(result)):
        print_whole(console, drawn)
    if (remaining := len(result.instances) - _MOST_INSTANCES) > 0:
        console.print(f"... and {remaining} more instances (-o json has all)", highlight=False)


def show_many(console: "Console", results: Sequence[Digest], slo: "Slo") -> None:
    """Print one line per rate."""
    headings = ("RATE", "ATTAINED", "TTFT P50", "P90", "P99", "TPOT P50", "P90", "P99", "BUSIEST")
    drawn = plain_table((), headings)
    for result in results:
        style = None if result.attainment >= slo.attainment else "red"
        drawn.add_row(
            number(result.rate),
            percent(result.attainment),
            *_three(result.ttft_ms),
            *_three(result.tpot_ms),
            percent(max(each.busy for each in result.instances)),
            style=style,
        )
    print_whole(console, drawn)
    targets = f"TTFT {milliseconds(slo.ttft_ms)}, TPOT {milliseconds(slo.tpot_ms)}"
    target = f"target: {percent(slo.attainment)} within {targets}"
    console.print(f"{target}; rates below it are red", style="dim", highlight=False)


def document(results: Sequence[Digest]) -> list[dict[str, Any]]:
    """The figures of every rate for JSON; values that are not finite become null."""
    return [_finite(asdict(result)) for result in results]


def write_csv(file: TextIO, outcome: "Outcome", names: Sequence[str]) -> None:
    """Write one line per request in order of arrival; a cell is empty if it was never reached."""
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


def _losses(result: Digest) -> Iterator[str]:
    if result.num_too_long:
        yield f"{result.num_too_long:,} requests fit no instance: their KV exceeds its memory"
    if result.num_unfinished:
        yield f"{result.num_unfinished:,} requests did not finish: no instance had room for them"


def _latencies(result: Digest) -> "Table":
    drawn = plain_table(("LATENCY",), ("P50", "P90", "P99"))
    rows = (
        ("TTFT", result.ttft_ms),
        ("TPOT", result.tpot_ms),
        ("arrival to end", result.latency_ms),
    )
    for name, latency in rows:
        drawn.add_row(name, *_three(latency))
    return drawn


def _stages(result: Digest) -> "Table":
    drawn = plain_table(("STAGE",), ("MEAN", "SHARE"))
    for each in result.stages:
        drawn.add_row(str(each.stage), milliseconds(each.mean_ms), f"{each.share:.1%}")
    return drawn


def _instances(result: Digest) -> "Table":
    drawn = plain_table(
        ("INSTANCE",), ("BUSY", "MFU", "PASSES", "BATCH", "KV MEAN", "KV PEAK", "PREEMPTIONS")
    )
    for each in result.instances[:_MOST_INSTANCES]:
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
