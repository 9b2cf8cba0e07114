"""Traffic on a terminal: figures, histograms of lengths, remarks, and the block for spec."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cleave.cli.output.tables import build_plain_table, print_full_width, print_line
from cleave.simulator.trace import Trace
from cleave.traffic.characterization import LengthSummary, TraceDescription

_BAR_WIDTH = 24
"""Maximum width of a bar in characters."""
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def show(
    title: str,
    trace: Trace,
    diagnosis: TraceDescription,
    warnings: Sequence[str],
    spec: dict[str, Any],
) -> None:
    """Print everything about one workload."""
    console = Console(highlight=False)
    console.print(
        Text(title, style="bold"), Text(_summarize(diagnosis), style="dim"), soft_wrap=True
    )
    print_full_width(console, _build_length_table(diagnosis))
    print_full_width(console, _build_histogram(trace))
    for line in warnings:
        print_line(console, f"- {line}")
    block = yaml.safe_dump({"workload": spec}, sort_keys=False)
    console.print(Text("\nfor spec of an LLMDeployment:", style="dim"))
    console.print(Text(block.rstrip()), soft_wrap=True)


def _summarize(diagnosis: TraceDescription) -> str:
    arrivals = diagnosis.arrivals
    if arrivals is None:
        return f"{diagnosis.num_requests:,} requests without arrival times"
    dispersion = "" if arrivals.dispersion is None else f", dispersion {arrivals.dispersion:.3g}"
    return (
        f"{diagnosis.num_requests:,} requests in {arrivals.duration_s:,.0f} s: "
        f"{arrivals.rate:.4g} req/s, burstiness {arrivals.burstiness:.3g}{dispersion}, "
        f"busiest tenth {arrivals.peak_to_mean:.2f} times the mean, "
        f"correlation of prompt and output {diagnosis.correlation:.2f}"
    )


def _build_length_table(diagnosis: TraceDescription) -> Table:
    figures = ("MEAN", "P50", "P90", "P99", "LARGEST", "FIT DISTANCE")
    table = build_plain_table(("TOKENS",), figures)
    table.add_row("prompt", *_format_figures(diagnosis.prompt_tokens))
    table.add_row("output", *_format_figures(diagnosis.output_tokens))
    return table


def _format_figures(lengths: LengthSummary) -> tuple[str, ...]:
    figures = (lengths.mean, lengths.p50, lengths.p90, lengths.p99, lengths.largest)
    return (*(f"{figure:,.0f}" for figure in figures), f"{lengths.fit_distance:.1%}")


def _build_histogram(trace: Trace) -> Table:
    """Shares of prompts and outputs between powers of two."""
    longest = int(max(trace.prompt_tokens.max(), trace.output_tokens.max()))
    shortest = int(min(trace.prompt_tokens.min(), trace.output_tokens.min()))
    powers = range(shortest.bit_length() - 1, longest.bit_length())
    prompts = _compute_shares(trace.prompt_tokens, powers)
    outputs = _compute_shares(trace.output_tokens, powers)
    table = build_plain_table((), ("TOKENS",))
    for heading in ("PROMPTS", "OUTPUTS"):
        table.add_column(heading, min_width=_BAR_WIDTH)
        table.add_column("", justify="right")
    widest = max(*prompts, *outputs)
    for power, prompt, output in zip(powers, prompts, outputs, strict=True):
        cells = (cell for share in (prompt, output) for cell in _format_bar(share, widest))
        table.add_row(f"{1 << power:,}", *cells)
    return table


def _compute_shares(tokens: NDArray[np.int64], powers: range) -> list[float]:
    bins = np.floor(np.log2(tokens)).astype(int) - powers.start
    shares: list[float] = (np.bincount(bins, minlength=len(powers)) / len(tokens)).tolist()
    return shares


def _format_bar(share: float, widest: float) -> tuple[Text, str]:
    eighths = round(share / widest * _BAR_WIDTH * 8)
    bar = "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
    return Text(bar, style="cyan"), f"{share:.1%}" if share else ""
