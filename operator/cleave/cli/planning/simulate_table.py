"""Results of simulations as terminal tables, as JSON, and per request as CSV."""

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Any, TextIO

from cleave.cli.output.tables import build_plain_table, convert_keys, print_full_width
from cleave.planner.plan import Percentiles
from cleave.planner.result.simulation_summary import InstanceLoad, SimulationSummary
from cleave.planner.result.text import (
    format_ms,
    format_number,
    format_percent,
    format_pools,
    format_targets,
)
from cleave.simulator.outcome import LatencyStage, compute_stage_ms

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from cleave.api.deployment import Slo
    from cleave.planner.plan import PlannedPool
    from cleave.simulator.outcome import SimulationResult

_MAX_INSTANCES = 16
_STAGE_FIELDS = {stage: f"{stage.name.lower()}_ms" for stage in LatencyStage}


def show_placement(console: "Console", pools: Sequence["PlannedPool"], *, is_set: bool) -> None:
    """Print which instances are simulated; `is_set`: spec.placement.manual states them."""
    default = "the default; cleave plan searches for the best one"
    origin = "set in spec.placement.manual" if is_set else default
    line = f"placement: {format_pools(pools, is_gpu_chosen=False)} ({origin})"
    console.print(line, highlight=False, soft_wrap=True)


def show_one(console: "Console", result: SimulationSummary, slo: "Slo") -> None:
    """Print latencies, SLO attainment, stages and instances at one rate."""
    console.print(
        f"{result.num_requests:,} requests at {format_number(result.rate)} req/s: "
        f"{format_percent(result.attainment)} within TTFT {format_ms(slo.ttft_ms)} "
        f"and TPOT {format_ms(slo.tpot_ms)} (target {format_percent(slo.attainment)}); "
        f"TTFT alone {_compare(result.ttft_attainment, slo.ttft_attainment)}, "
        f"TPOT alone {_compare(result.tpot_attainment, slo.tpot_attainment)}"
        f"{_compare_itl(result, slo)}",
        highlight=False,
        soft_wrap=True,
    )
    if result.cached_share > 0:
        console.print(
            f"{format_percent(result.cached_share)} of the prompt tokens were in prefix caches",
            highlight=False,
        )
    for sentence in _describe_losses(result):
        console.print(sentence, style="red", highlight=False, soft_wrap=True)
    for build_table in (_build_latency_table, _build_stage_table, _build_instance_table):
        print_full_width(console, build_table(result))
    if (remaining := len(result.instances) - _MAX_INSTANCES) > 0:
        console.print(f"... and {remaining} more instances (-o json has all)", highlight=False)


def show_many(console: "Console", results: Sequence[SimulationSummary], slo: "Slo") -> None:
    """Print one line per rate."""
    latencies = ((f"{name} P50", "P90", "P99") for name in ("TTFT", "TPOT", "ITL"))
    table = build_plain_table((), ("RATE", "ATTAINED", *chain.from_iterable(latencies), "BUSIEST"))
    table.add_column("SLO", no_wrap=True)
    for result in results:
        is_met = result.holds(slo)
        table.add_row(
            format_number(result.rate),
            format_percent(result.attainment),
            *_format_percentiles(result.ttft_ms),
            *_format_percentiles(result.tpot_ms),
            *_format_percentiles(result.itl_ms),
            format_percent(max(each.busy for each in result.instances)),
            "met" if is_met else "missed",
            style=None if is_met else "red",
        )
    print_full_width(console, table)
    target = f"target: {format_percent(slo.attainment)} within {format_targets(slo)}"
    console.print(target, style="dim", highlight=False, soft_wrap=True)


def build_document(results: Sequence[SimulationSummary]) -> list[dict[str, Any]]:
    """The figures of every rate for JSON; values that are not finite become null."""
    return [convert_keys(_replace_non_finite(asdict(result))) for result in results]


def write_csv(file: TextIO, outcome: "SimulationResult", names: Sequence[str]) -> None:
    """Write one line per request in order of arrival; a cell is empty if it was never reached."""
    stages = compute_stage_ms(outcome)
    writer = csv.writer(file, lineterminator="\n")
    times = ("arrival_ms", "ttft_ms", "tpot_ms", "end_ms", "output_tokens")
    counts = ("prefill_instance", "decode_instance", "preemptions")
    writer.writerow((*times, *_STAGE_FIELDS.values(), *counts))
    columns = (outcome.arrival_ms, outcome.ttft_ms, outcome.tpot_ms, outcome.end_ms)
    for index in range(len(outcome.arrival_ms)):
        writer.writerow(
            [
                *(_format_cell(column[index]) for column in columns),
                int(outcome.output_tokens[index]),
                *(_format_cell(stages[stage][index]) for stage in _STAGE_FIELDS),
                _get_name(names, outcome.prefill_instance[index]),
                _get_name(names, outcome.decode_instance[index]),
                int(outcome.num_preemptions[index]),
            ]
        )


def _compare(share: float, target: float | None) -> str:
    own = "" if target is None else f" (target {format_percent(target)})"
    return format_percent(share) + own


def _compare_itl(result: SimulationSummary, slo: "Slo") -> str:
    if slo.itl_p99_ms is None:
        return ""
    return f"; ITL P99 {format_ms(result.itl_ms.p99)} (target {format_ms(slo.itl_p99_ms)})"


def _describe_losses(result: SimulationSummary) -> Iterator[str]:
    if result.num_too_long:
        yield f"{result.num_too_long:,} requests fit no instance: their KV exceeds its memory"
    if result.num_unfinished:
        yield f"{result.num_unfinished:,} requests did not finish: no instance had room for them"


def _build_latency_table(result: SimulationSummary) -> "Table":
    table = build_plain_table(("LATENCY",), ("P50", "P90", "P99"))
    table.add_row("TTFT", *_format_percentiles(result.ttft_ms))
    table.add_row("TPOT", *_format_percentiles(result.tpot_ms))
    table.add_row("ITL", *_format_percentiles(result.itl_ms))
    table.add_row("arrival to end", *_format_percentiles(result.latency_ms))
    return table


def _build_stage_table(result: SimulationSummary) -> "Table":
    table = build_plain_table(("STAGE",), ("MEAN", "SHARE"))
    for each in result.stages:
        table.add_row(str(each.stage), format_ms(each.mean_ms), f"{each.share:.1%}")
    return table


def _build_instance_table(result: SimulationSummary) -> "Table":
    table = build_plain_table(
        ("INSTANCE",), ("BUSY", "MFU", "ITERATIONS", "BATCH", "KV MEAN", "KV PEAK", "PREEMPTIONS")
    )
    for each in result.instances[:_MAX_INSTANCES]:
        table.add_row(*_format_load(each))
    return table


def _format_load(each: InstanceLoad) -> Iterator[str]:
    yield each.name
    yield format_percent(each.busy)
    yield "-" if math.isnan(each.mfu) else format_percent(each.mfu)
    yield f"{each.passes:,}"
    yield format_number(each.mean_batch)
    yield format_percent(each.kv_usage)
    yield format_percent(each.kv_peak)
    yield f"{each.preemptions:,}"


def _format_percentiles(latency: Percentiles) -> Iterator[str]:
    return map(format_ms, (latency.p50, latency.p90, latency.p99))


def _replace_non_finite(value: Any) -> Any:  # noqa: ANN401 - JSON has no narrower type
    if isinstance(value, dict):
        return {key: _replace_non_finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _format_cell(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3f}"


def _get_name(names: Sequence[str], index: int) -> str:
    return names[index] if index >= 0 else ""
