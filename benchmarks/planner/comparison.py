"""Cleave beside simdistserve and Vidur, in one run and on one core.

Called by run.py. simdistserve computes the same attainments (the same traces, coefficients and
batching: see matched.py), for its searches, and both for simulated requests per second.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import searches
import speed
from agreement import Agreement, agree
from bisection import find_rate
from matched_fleets import Case, Match, match, to_fleet, to_trace
from other_planners import Config, Grid, GridResult, Trial, run_simdistserve, run_vidur
from rich.console import Console
from rich.table import Table

from cleave.simulator.fleet import SimulatedEngine, SimulatedFleet, SimulatedPool
from cleave.simulator.run import simulate
from cleave.simulator.trace import Trace
from cleave.traffic import published

NUM_REQUESTS = 1000
DATASET_SIZE = 20_000
GRIDS = {
    "small": (Grid("1x4 GPUs, Algorithm 2", 1, 4, high=False),),
    "sample": (
        Grid("1x4 GPUs, Algorithm 2", 1, 4, high=False),
        Grid("4x8 GPUs, Algorithm 1", 4, 8, high=True, sample=40),
        Grid("4x8 GPUs, Algorithm 2", 4, 8, high=False, sample=20),
    ),
    "whole": (
        Grid("1x4 GPUs, Algorithm 2", 1, 4, high=False),
        Grid("4x8 GPUs, Algorithm 1", 4, 8, high=True),
        Grid("4x8 GPUs, Algorithm 2", 4, 8, high=False),
    ),
}
COUNTERPARTS = (
    (("1x4 GPUs, Algorithm 2",), ("Algorithm 2, 4 GPUs, pairs",)),
    (
        ("4x8 GPUs, Algorithm 1", "4x8 GPUs, Algorithm 2"),
        ("Algorithm 1, 32 GPUs", "Algorithm 2, 32 GPUs, pairs"),
    ),
)
"""simdistserve's grids and the searches of run.py that ask the same."""
VIDUR_RATE = 0.4


@dataclass(frozen=True, slots=True)
class Compared:
    """One case, simulated by both."""

    case: Case
    match: Match
    agreement: Agreement
    their_s: float
    our_s: float


@dataclass(frozen=True, slots=True)
class Peers:
    """Everything measured of the peers."""

    compared: list[Compared]
    grids: dict[str, GridResult]
    differing: dict[str, list[tuple[Config, float | None, float | None]]]
    """By grid: configurations whose goodput per GPU is not the same, theirs and ours."""
    vidur_per_second: float | None
    """Requests."""
    ours_as_vidur_per_second: float | None


def cases() -> list[Case]:
    """Loads around where each configuration fails its targets."""
    small, large = (200.0, 100.0), (400.0, 100.0)
    one, two, four, eight = (1, 1), (2, 1), (4, 1), (8, 1)
    pairs = [
        *_pairs("opt-13b", one, one, small, (1.0, 2.0, 3.0, 4.0)),
        *_pairs("opt-13b", two, one, small, (2.0, 4.0, 5.0, 6.0)),
        *_pairs("opt-13b", two, two, small, (4.0, 6.0, 8.0)),
        *_pairs("opt-13b", four, two, small, (4.0, 6.0, 8.0)),
        *_pairs("opt-66b", four, two, large, (1.0, 2.0, 2.5)),
        *_pairs("opt-66b", eight, four, large, (2.0, 3.0, 4.0)),
        *_pairs("opt-13b", (1, 2), (1, 2), small, (4.0, 6.0)),
        *_pairs("opt-66b", four, (2, 2), large, (2.0, 3.0)),
    ]
    alone = [
        *_alone("opt-13b", one, small, (1.0, 1.5, 2.0, 2.5)),
        *_alone("opt-13b", two, small, (2.0, 3.0)),
        *_alone("opt-66b", four, large, (0.5, 1.0)),
    ]
    return [*pairs, *alone]


def _pairs(
    model: str,
    prefill: tuple[int, int],
    decode: tuple[int, int],
    targets_ms: tuple[float, float],
    rates: Sequence[float],
) -> Iterator[Case]:
    return (Case("distserve", model, prefill, decode, rate, targets_ms) for rate in rates)


def _alone(
    model: str, size: tuple[int, int], targets_ms: tuple[float, float], rates: Sequence[float]
) -> Iterator[Case]:
    return (Case("vllm", model, size, (0, 0), rate, targets_ms) for rate in rates)


def measure(options: argparse.Namespace, console: Console) -> Peers:
    """Raises AnchorError."""
    compared: list[Compared] = []
    grids: dict[str, GridResult] = {}
    differing: dict[str, list[tuple[Config, float | None, float | None]]] = {}
    theirs = ours = None
    if options.anchor is not None:
        console.print(f"running simdistserve ({options.grid} grid)", style="dim")
        dataset = published.get_workload(searches.WORKLOAD).build_demand().draw(DATASET_SIZE)
        compared, grids = _compare(options, dataset)
        differing = {
            grid.name: _differing(grid, grids[grid.name], dataset) for grid in GRIDS[options.grid]
        }
    if options.vidur is not None:
        console.print("running Vidur", style="dim")
        seconds = run_vidur(options.vidur, options.python, NUM_REQUESTS, VIDUR_RATE)
        theirs, ours = NUM_REQUESTS / seconds, _as_vidur()
    return Peers(compared, grids, differing, theirs, ours)


def _differing(
    grid: Grid, result: GridResult, dataset: Trace
) -> list[tuple[Config, float | None, float | None]]:
    rates = [(config, rate, find_rate(grid, config, dataset)) for config, rate in result.found]
    return [(config, theirs, ours) for config, theirs, ours in rates if theirs != ours]


def _compare(
    options: argparse.Namespace, dataset: Trace
) -> tuple[list[Compared], dict[str, GridResult]]:
    demand = published.get_workload(searches.WORKLOAD).build_demand()
    all_cases = cases()
    traces = [demand.draw(NUM_REQUESTS, case.rate) for case in all_cases]
    trials = [
        Trial(case.backend, f"facebook/{case.model}", case.prefill, case.decode, trace)
        for case, trace in zip(all_cases, traces, strict=True)
    ]
    grids = GRIDS[options.grid]
    found, results = run_simdistserve(options.anchor, options.python, dataset, grids, trials)
    compared = []
    for case, trace, theirs in zip(all_cases, traces, results, strict=True):
        fleet, same = to_fleet(case), to_trace(trace)
        outcome = simulate(fleet, same)
        seconds, times = speed.repeat(lambda fleet=fleet, same=same: simulate(fleet, same))
        agreement = agree(
            (outcome.ttft_ms.tolist(), outcome.tpot_ms.tolist()),
            (theirs.ttft_ms, theirs.tpot_ms),
            case.targets_ms,
        )
        compared.append(
            Compared(case, match(case, outcome), agreement, theirs.seconds, seconds / times)
        )
    return compared, {grid.name: result for grid, result in zip(grids, found, strict=True)}


def _as_vidur() -> float:
    """The same lengths in distribution, rate and policy on one mixed instance, requests per second.

    The passes are OPT-66B's with TP 2, the closest that is known: speed hardly depends on them.
    """
    engine = speed.engine("opt-66b", 2, 1)
    chunked = SimulatedEngine(
        timing=engine.timing,
        kv_capacity_tokens=speed.AMPLE_TOKENS,
        max_num_seqs=128,
        max_num_batched_tokens=512,
    )
    subject = speed.Subject(
        "as Vidur", SimulatedFleet(mixed=(SimulatedPool(chunked, 1),)), VIDUR_RATE, NUM_REQUESTS
    )
    return speed.requests_per_second(subject, published.get_workload("arxiv-4k").build_demand())


# ---- the result ----


def print_tables(
    peers: Peers, found: Mapping[str, tuple[Any, searches.Search]], console: Console
) -> None:
    if peers.compared:
        _print_compared(peers.compared, console)
        _print_grids(peers, found, console)
    if peers.vidur_per_second is not None and peers.ours_as_vidur_per_second is not None:
        ratio = peers.ours_as_vidur_per_second / peers.vidur_per_second
        console.print(
            f"\nSarathi, chunks of 512, arXiv's lengths: Vidur {peers.vidur_per_second:,.0f} "
            f"requests/s, Cleave {peers.ours_as_vidur_per_second:,.0f}: {ratio:,.0f} times"
        )


def _print_compared(compared: list[Compared], console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    columns = ("case", "simdistserve %", "Cleave %", "points", "largest ms", "faster", "match")
    for column in columns:
        table.add_column(column, justify="left" if column in ("case", "match") else "right")
    for one in compared:
        agreement = one.agreement
        table.add_row(
            one.case.name,
            f"{100 * agreement.theirs:.1f}",
            f"{100 * agreement.ours:.1f}",
            f"{agreement.points:.1f}",
            f"{agreement.largest_ms:.2g}",
            f"{one.their_s / one.our_s:,.0f}x",
            one.match.value,
        )
    console.print(table)
    for kind in Match:
        some = [one.agreement for one in compared if one.match is kind]
        if some:
            points = max(each.points for each in some)
            largest = max(each.largest_ms for each in some)
            console.print(
                f"{kind.value}: {len(some)} cases, at most {points:.1f} points and {largest:.2g} "
                "ms of any request apart"
            )
    theirs = sum(one.their_s for one in compared) / len(compared) / NUM_REQUESTS
    ours = sum(one.our_s for one in compared) / len(compared) / NUM_REQUESTS
    console.print(
        f"simdistserve {1 / theirs:,.0f} requests/s, Cleave {1 / ours:,.0f}: "
        f"{theirs / ours:,.0f} times"
    )


def _print_grids(
    peers: Peers, found: Mapping[str, tuple[Any, searches.Search]], console: Console
) -> None:
    for name, grid in peers.grids.items():
        how = "scaled up from a sample" if grid.is_sampled else f"best {grid.best}"
        console.print(
            f"simdistserve, {name}: {grid.num_configs} configurations, {grid.seconds:,.0f} CPU s "
            f"(300 requests a trial); {how}"
        )
        differing = peers.differing[name]
        console.print(
            f"  the same bisection on Cleave's simulator: {len(grid.found) - len(differing)} of "
            f"{len(grid.found)} configurations give the same goodput"
        )
        if any(max(config[0] * config[2], config[0] * config[4]) > 1 for config, *_ in differing):
            console.print(
                "  with pipeline stages it lets any number of passes in; its engine does not, nor "
                "does vLLM or Cleave"
            )
        for config, theirs, ours in differing:
            console.print(f"  {config}: {theirs} there, {ours} here")
    for names, own in COUNTERPARTS:
        if all(name in peers.grids for name in names):
            theirs = sum(peers.grids[name].seconds for name in names)
            ours = sum(found[name][0].median for name in own)
            console.print(
                f"{' and '.join(names)}: simdistserve {theirs:,.0f} s, Cleave {ours:.2f} s (1,000 "
                f"requests a trial and more): {theirs / ours:,.0f} times"
            )
