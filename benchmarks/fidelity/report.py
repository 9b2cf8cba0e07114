"""The comparisons as tables and as JSON."""

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from compare import Comparison
from rich.console import Console
from rich.table import Table

WIDTH = 156
BUSY_SHARE = 0.85
"""Beyond it processes wait for cores, and times are the machine's."""


@dataclass(frozen=True, slots=True)
class Report:
    """One benchmark's figures."""

    kind: str
    machine: str
    time_scale: float
    cases: Mapping[str, Sequence[Comparison]]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)


def describe_machine() -> str:
    """CPU, cores and how busy they are."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    busy = os.getloadavg()[0]
    return f"{len(names)} x {names[0]}, {platform.release()}, load {busy:.1f} at the end"


def print_report(report: Report) -> None:
    out = Console(width=WIDTH)
    for case, comparisons in report.cases.items():
        out.print(build_table(f"{report.kind} {case}", comparisons))
    out.print(f"- {report.machine}; one ms of the trace took {report.time_scale:g} ms")
    for line in (*report_pass_scales(report), *find_doubts(report)):
        out.print(f"- {line}", highlight=False)


def build_table(title: str, comparisons: Sequence[Comparison]) -> Table:
    table = Table(title=title, title_justify="left")
    heads = ["load", "req/s", "attainment", "simulated", "chance", "points", "worst"]
    has_cached = any(each.cached[1] for each in comparisons)
    if has_cached:
        heads += ["cached", "simulated"]
    percents = ("TTFT p50", "p95", "TPOT p50", "p95", "norm. p50", "p95", "ITL p50", "p90", "p99")
    for head in (*heads, *percents):
        table.add_column(head, justify="right")
    for each in comparisons:
        errors = [
            f"{each.error(measure, percentile):+.1%}"
            for measure in ("ttft_ms", "tpot_ms", "normalised_ms")
            for percentile in (50, 95)
        ]
        errors += [f"{each.error('itl_ms', percentile):+.1%}" for percentile in (50, 90, 99)]
        table.add_row(
            f"{each.share:.0%}",
            f"{each.rate:.2f}",
            *(f"{share:.1%}" for share in each.attainment),
            f"{each.chance_points:.1f}",
            f"{each.points:+.1f}",
            f"{each.worst_points:.1f}",
            *(f"{share:.1%}" for share in each.cached if has_cached),
            *errors,
        )
    return table


def report_pass_scales(report: Report) -> Iterator[str]:
    """What passes were simulated to take, where that is not what was profiled."""
    for case, comparisons in report.cases.items():
        scales = {
            f"{each.share:.0%}": each.pass_scale
            for each in comparisons
            if (each.pass_scale.prompt, each.pass_scale.decode) != (1.0, 1.0)
        }
        if len(set(scales.values())) == 1:
            scales = {"all": next(iter(scales.values()))}
        for load, scale in scales.items():
            pulls = f", pulls {scale.pull_ms:.1f} ms + {scale.pull_block_ms:.2f} per block"
            pull = pulls if scale.pull_ms else ""
            prompts = f"prompts x {scale.prompt:.3f}"
            yield f"{case}, {load}: {prompts}, decoding x {scale.decode:.3f}{pull}"


def find_doubts(report: Report) -> list[str]:
    """What makes figures worth less: failed requests, a late generator, a busy machine."""
    # The loads of a case are the same for any simulated pass times.
    cases = {case.partition(",")[0]: found for case, found in report.cases.items()}
    doubts = []
    for case, comparisons in cases.items():
        failed = sum(each.failed for each in comparisons)
        lag_ms = max(each.lag_p99_ms for each in comparisons)
        if failed:
            doubts.append(f"{case}: {failed} requests failed and count as missed")
        doubts.append(f"{case}: the generator sent {lag_ms:.1f} ms late at worst (p99)")
        busy = [f"{each.share:.0%}" for each in comparisons if each.busy_share > BUSY_SHARE]
        if busy:
            doubts.append(f"{case}: the machine had no core left at loads {', '.join(busy)}")
    return doubts
