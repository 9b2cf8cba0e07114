"""Speed of the planner on one core, and its simulator beside simdistserve's, request by request.

Called by `make bench-planner`. Everything runs on one core, peers too. Figures are CPU time where
the work is ours to call, wall time where a command is started. README.md explains how to read them.
"""

import argparse
import json
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import comparison
import cores
import searches
import speed
from commands import CommandError, measure
from other_planners import AnchorError
from rich.console import Console
from rich.table import Table
from summary_statistics import Spread, spread

from cleave.traffic import published

WIDTH = 118
BOTH = ("Algorithm 1, 32 GPUs", "Algorithm 2, 32 GPUs, pairs")
"""simdistserve's two searches for the paper's testbed."""


@dataclass(frozen=True, slots=True)
class Report:
    """All figures of one run."""

    machine: str
    notes: tuple[str, ...]
    requests_per_second: Mapping[str, Spread]
    """Simulated, by fleet."""
    us_per_request: Mapping[str, Spread]
    """As GPUs and requests grow."""
    searches: Mapping[str, tuple[Spread, searches.Search]]
    """CPU seconds over the rounds, and the last round's answer."""
    waits_s: Mapping[str, Spread]
    """Commands in fresh processes."""
    peers: comparison.Peers | None


def run(options: argparse.Namespace, console: Console) -> Report:
    core, busy = cores.pin()
    notes = [f"core {core}, {busy:.0%} busy before", f"{options.rounds} rounds"]
    demand = published.get_workload(searches.WORKLOAD).build_demand()
    console.print("simulating fleets", style="dim")
    rates = _over_rounds(
        options.rounds,
        {
            one.name: lambda one=one: speed.requests_per_second(one, demand)
            for one in speed.subjects()
        },
    )
    growing = [*speed.growing_fleets(), *speed.growing_traces()]
    costs = _over_rounds(
        options.rounds,
        {one.name: lambda one=one: 1e6 / speed.requests_per_second(one, demand) for one in growing},
    )
    console.print("searching placements", style="dim")
    found = {
        name: _search(search, options.rounds)
        for name, search in list_searches(options.quick).items()
    }
    console.print("starting commands", style="dim")
    try:
        waits = [asdict(measure()) for _ in range(options.rounds)]
    except CommandError as error:
        waits = []
        notes.append(str(error))
    peers = comparison.measure(options, console) if options.anchor or options.vidur else None
    return Report(
        machine=f"{cores.describe()}, Python {platform.python_version()}",
        notes=tuple(notes),
        requests_per_second=rates,
        us_per_request=costs,
        searches=found,
        waits_s={
            name: spread([wait[name] for wait in waits]) for name in (waits[0] if waits else {})
        },
        peers=peers,
    )


def list_searches(is_quick: bool) -> dict[str, Callable[[], searches.Search]]:
    """By name."""
    searches_by_name: dict[str, Callable[[], searches.Search]] = {
        BOTH[0]: lambda: searches.algorithm_1(4),
        BOTH[1]: lambda: searches.algorithm_2(4, searches.PAIR),
        "Algorithm 2, 4 GPUs, pairs": lambda: searches.algorithm_2(1, searches.PAIR, 4),
    }
    if not is_quick:
        searches_by_name |= {
            "Algorithm 2, 32 GPUs, any replicas": lambda: searches.algorithm_2(4),
            "Algorithm 1, 8 GPUs": lambda: searches.algorithm_1(1),
            "Algorithm 1, 1,024 GPUs": lambda: searches.algorithm_1(128),
            "Algorithm 2, 8 GPUs, pairs": lambda: searches.algorithm_2(1, searches.PAIR),
            "Algorithm 2, 1,024 GPUs, pairs": lambda: searches.algorithm_2(128, searches.PAIR),
            "whole answer, 8 GPUs": lambda: searches.whole_answer(1),
            "whole answer, 32 GPUs": lambda: searches.whole_answer(4),
            "whole answer, 1,024 GPUs": lambda: searches.whole_answer(128),
        }
    return searches_by_name


def _search(search: Callable[[], searches.Search], rounds: int) -> tuple[Spread, searches.Search]:
    results = [search() for _ in range(rounds)]
    return spread([result.cpu_s for result in results]), results[-1]


def _over_rounds(rounds: int, measures: Mapping[str, Callable[[], float]]) -> dict[str, Spread]:
    """Interleaved, so that a machine that slows down for a while slows all of them."""
    found: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, one in measures.items():
            found[name].append(one())
    return {name: spread(values) for name, values in found.items()}


# ---- the result ----


def print_tables(report: Report, console: Console) -> None:
    console.print(f"\n{report.machine}; {'; '.join(report.notes)}", soft_wrap=True)
    _print_figures(
        console,
        "simulated requests/s (1,000 per trace)",
        {name: figure.format(0) for name, figure in report.requests_per_second.items()},
    )
    _print_figures(
        console,
        "us per request",
        {name: figure.format(2) for name, figure in report.us_per_request.items()},
    )
    table = _table("search", "CPU s", "candidates", "trials", "requests", "req/s per GPU", "best")
    for name, (seconds, last) in report.searches.items():
        counts = [
            "-" if count is None else f"{count:,}"
            for count in (last.num_candidates, last.num_trials, last.num_requests)
        ]
        table.add_row(name, seconds.format(2), *counts, f"{last.goodput_per_gpu:.2f}", last.best)
    console.print(table)
    together = [report.searches[name][0].median for name in BOTH]
    console.print(f"{' and '.join(BOTH)} together: {sum(together):.2f} CPU s")
    _print_figures(
        console,
        "seconds until a command ends",
        {name.removesuffix("_s"): figure.format(2) for name, figure in report.waits_s.items()},
    )
    if report.peers is not None:
        comparison.print_tables(report.peers, report.searches, console)


def _print_figures(console: Console, title: str, figures: Mapping[str, str]) -> None:
    table = _table(title, "median (least-most)")
    for name, figure in figures.items():
        table.add_row(name, figure)
    console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="left", overflow="fold")
    return table


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of the main figures")
    parser.add_argument("--anchor", type=Path, help="clone of LLMServe/DistServe")
    parser.add_argument("--vidur", type=Path, help="clone of microsoft/vidur at e2d00e9")
    parser.add_argument(
        "--python", type=Path, default=Path(sys.executable), help="the peers' Python"
    )
    parser.add_argument(
        "--grid",
        choices=("small", "sample", "whole"),
        default="sample",
        help="what of simdistserve's searches is measured: 1x4 GPUs (20 s), also a random tenth "
        "of the 4x8 grids, scaled up (3 min), or all of them (half an hour)",
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.quick:
        options.rounds = 1
    return options


def main() -> int:
    options = parse_arguments()
    console = Console(stderr=options.output == "json", width=WIDTH)
    try:
        report = run(options, console)
    except AnchorError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return 1
    if options.output == "json":
        print(json.dumps(asdict(report), indent=2))
    else:
        print_tables(report, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
