"""Dispatch policies compared: queueing delay, goodput per GPU, Aladdin's savings, cost of a pick.

`python benchmarks/dispatch/run.py [queues|gateways|processes|goodput|best-fit|savings|colocated|
moves|adapters|cost|pairs|caches|views ...]`; without names all of them, an hour on one core.
`--quick`: does all of it work? Quote none of its figures.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import adapters
import cache_views
import caches
import colocated_savings
import cost
import goodput
import moves
import numpy as np
import processes
import queueing
import savings
import several_gateways
import traces
from fleets import worker
from numpy.typing import NDArray
from queueing import Way
from rich.console import Console
from rich.table import Table

from cleave.api.enums import DispatchPolicy

WIDTH = 150
LOADS = (0.5, 0.7, 0.8, 0.9, 0.95)
SIZES = (8, 64, 1024)
PAIR_SIZES = ((4, 4), (32, 32), (256, 512))
"""Prefill and decode instances."""
GATEWAYS = (1, 2, 4, 8)
SHARED_GATEWAYS = (1, 2, 4)
SHARED_FLEETS = {"mixed": 8}, {"prefill": 4, "decode": 4}
"""Instances by role."""
PROCESS_LOADS = (0.8, 0.9, 0.95)
ESTIMATE_ERROR = 0.2
"""Spread of token estimates that are made of bytes."""
WAYS = (
    Way.RANDOM,
    Way.ROUND_ROBIN,
    Way.POWER_OF_TWO,
    Way.LEAST_REQUESTS,
    Way.PENDING_TOKENS,
    Way.BY_TOKENS,
    Way.EARLIEST,
)
APART = (
    Way.POWER_OF_TWO,
    Way.LEAST_REQUESTS,
    Way.PENDING_TOKENS,
    Way.BY_TOKENS,
    Way.EARLIEST,
    Way.HOME,
)

ALADDIN_CASES = (("llama-2-70b", 2, 75.0), ("llama-2-13b", 1, 30.0))
"""Table 2 of the paper: models, tensor parallel sizes and TPOT targets of its A100 testbed."""

COLOCATED_CASES = (
    ("llama-2-70b", 2, 1600.0, 75.0, (1.0, 2.5, 5.0)),
    ("llama-2-13b", 1, 600.0, 30.0, (2.5, 5.0, 10.0)),
)
"""Tables 2 and 3: models, best tensor parallel size, TTFT and TPOT targets on A100; rates."""
COLOCATED_GPU = "A100-PCIe-80GB"
"""The paper's A100 have no NVLink."""
DEFAULT_TENSOR = 4
"""All GPUs of the paper's machines."""

Rows = list[dict[str, object]]


@dataclass(frozen=True, slots=True)
class Cell:
    """One measured point of the queues."""

    instances: int
    load: float
    gateways: int
    way: str
    mean_ms: float
    p99_ms: float
    of_bound: float | None
    """Mean, as a multiple of the bound's; None: nothing waits in the bound."""


def queues(console: Console, quick: bool) -> Rows:
    """One gateway, or several that share their books."""
    cells = [
        cell
        for instances in (SIZES[:1] if quick else SIZES)
        for load in LOADS
        for cell in _measure(instances, load, 1, WAYS, quick)
    ]
    for instances in sorted({cell.instances for cell in cells}):
        some = [cell for cell in cells if cell.instances == instances]
        title = f"{instances} instances, shared state: queueing delay, mean / p99 in ms (x bound)"
        _print_cells(console, title, some, lambda cell: f"load {cell.load:g}")
    return [asdict(cell) for cell in cells]


def gateways(console: Console, quick: bool) -> Rows:
    """Several gateways that know of each other what instances report each 100 ms."""
    cells = [
        cell
        for instances in (SIZES[:1] if quick else SIZES)
        for count in GATEWAYS
        for cell in _measure(instances, 0.9, count, APART, quick)
    ]
    for instances in sorted({cell.instances for cell in cells}):
        some = [cell for cell in cells if cell.instances == instances]
        title = f"{instances} instances, load 0.9, state apart: mean / p99 in ms (x bound)"
        _print_cells(console, title, some, lambda cell: f"{cell.gateways} gateways")
    return [asdict(cell) for cell in cells]


def together(console: Console, quick: bool) -> Rows:
    """One gateway of several processes with shared books: the router itself, not a model of it."""
    cells: list[Cell] = []
    for instances in SIZES[:1] if quick else SIZES:
        some = [
            cell
            for load in (PROCESS_LOADS[-1:] if quick else PROCESS_LOADS)
            for cell in _measure_processes(instances, load, quick)
        ]
        title = f"{instances} instances, books shared by processes: mean / p99 in ms (x bound)"
        _print_cells(console, title, some, lambda cell: f"load {cell.load:g}")
        cells += some
    return [asdict(cell) for cell in cells]


def _measure_processes(instances: int, load: float, quick: bool) -> Iterable[Cell]:
    drawn = queueing.draw_load(
        _read_prompts(),
        instances=instances,
        utilisation=load,
        requests=5_000 if quick else max(50_000, 100 * instances),
        seed=1,
    )
    bound = queueing.measure(drawn, instances=instances, gateways=1, way=Way.BOUND, seed=1)
    yield _describe(instances, load, 1, "bound", bound, bound.mean)
    for count in GATEWAYS:
        delay = processes.measure(drawn, instances=instances, processes=count, seed=1)
        yield _describe(instances, load, count, f"{count} of shared books", delay, bound.mean)


def _measure(
    instances: int, load: float, count: int, ways: Sequence[Way], quick: bool
) -> Iterable[Cell]:
    """The bound first; with one gateway the last two ways once more, with lengths mistaken."""
    prompt = _read_prompts()
    requests = 5_000 if quick else max(200_000, 400 * instances)
    tries: list[tuple[Way, float]] = [(way, 0.0) for way in (Way.BOUND, *ways)]
    if Way.HOME not in ways:
        tries += [(way, ESTIMATE_ERROR) for way in ways[-2:]]
    bound = 0.0
    for way, error in tries:
        drawn = queueing.draw_load(
            prompt, instances=instances, utilisation=load, requests=requests, seed=1, error=error
        )
        delay = queueing.measure(drawn, instances=instances, gateways=count, way=way, seed=1)
        if way is Way.BOUND:
            bound = delay.mean
        name = way.name.lower().replace("_", " ") + (f", lengths +-{error:.0%}" if error else "")
        yield _describe(instances, load, count, name, delay, bound)


def _read_prompts() -> NDArray[np.int64]:
    return np.concatenate([traces.read(name).prompt_tokens for name in ("code", "conv")])


def _describe(
    instances: int, load: float, count: int, name: str, delay: queueing.Delay, bound: float
) -> Cell:
    of_bound = delay.mean / bound if bound else None
    return Cell(instances, load, count, name, delay.mean, delay.p99, of_bound)


def goodputs(console: Console, quick: bool) -> Rows:
    """Decode batches, KV, interference: the simulator's fleets."""
    conv = traces.read("conv")
    targets = goodput.Targets(2000, 100)
    requests = 500 if quick else 4000
    one = worker("llama-2-70b", "H100-SXM-80GB", 4)
    fleets = [
        (f"8 mixed: {one.name}", goodput.colocated(one, 8, targets), 8),
        (f"4 prefill, 6 decode: {one.name}", goodput.split(one, 4, 6, targets), 10),
    ]
    small = worker("llama-2-13b", "A100-SXM-80GB", 1)
    tight = goodput.Targets(1000, 50)
    fleets_small = [
        (f"32 mixed: {small.name}", goodput.colocated(small, 32, tight), 32),
        (f"16 prefill, 16 decode: {small.name}", goodput.split(small, 16, 16, tight), 32),
    ]
    rows: Rows = []
    for some, kind, aim in ((fleets, one, targets), (fleets_small, small, tight)):
        for name, fleet, count in some[: 1 if quick else None]:
            found = goodput.compare(name, fleet, count * kind.gpus, conv, aim, requests)
            table = _table("policy", "req/s per GPU", "outputs known")
            for row in found:
                table.add_row(row.policy.lower(), f"{row.per_gpu:.4f}", f"{row.knowing:.4f}")
            title = f"{name}; Azure conversation, TTFT {aim.ttft_ms:g} ms, TPOT {aim.tpot_ms:g} ms"
            _print(console, title, table)
            rows += [asdict(row) for row in found]
    return rows


def shared(console: Console, quick: bool) -> Rows:
    """Best fit by several gateways."""
    rows: Rows = []
    conv, targets = traces.read("conv"), goodput.Targets(1000, 50)
    one = worker("llama-2-13b", "A100-SXM-80GB", 1)
    requests, seeds = (300, range(1)) if quick else (4000, range(3))
    for counts in SHARED_FLEETS[: 1 if quick else None]:
        found = several_gateways.compare(
            one, counts, conv, targets, requests, SHARED_GATEWAYS, seeds
        )
        table = _table("policy", *(f"{count} gateways" for count in SHARED_GATEWAYS))
        for row in found:
            table.add_row(row.policy, *(f"{rate:.3f}" for rate in row.per_gpu.values()))
        aim = f"TTFT {targets.ttft_ms:g} ms, TPOT {targets.tpot_ms:g} ms"
        _print(console, f"{found[0].fleet}; Azure conversation, {aim}: req/s per GPU", table)
        rows += [asdict(row) for row in found]
    return rows


def saved(console: Console, quick: bool) -> Rows:
    """Aladdin's figure 12."""
    rows: Rows = []
    for name, tensor, tpot_ms in ALADDIN_CASES[: 1 if quick else None]:
        one = worker(name, "A100-SXM-80GB", tensor)
        for share in (1.0, 0.99):
            table = _table("rate", *(each.name.lower() for each in savings.COMPARED), "saved")
            for rate in (10.0, 25.0, 50.0, 100.0)[: 1 if quick else None]:
                requests = 500 if quick else 4000
                found = savings.count_at(one, traces.read("conv"), rate, tpot_ms, requests, share)
                for known, counts in (("", found.predicted), (", outputs known", found.known)):
                    fit = counts["BEST_FIT"]
                    against = [counts[other] for other in ("LEAST_REQUESTS", "POWER_OF_TWO")]
                    table.add_row(
                        f"{rate:g}{known}",
                        *map(str, counts.values()),
                        " / ".join(f"{1 - fit / other:.0%}" if other else "-" for other in against),
                    )
                rows.append({"worker": one.name, "share": share} | asdict(found))
            title = f"Decode instances for TPOT {tpot_ms:g} ms of {share:.0%}: {one.name}"
            _print(console, title, table)
    return rows


def saved_colocated(console: Console, quick: bool) -> Rows:
    """Aladdin's figure 11."""
    rows: Rows = []
    for name, tensor, ttft_ms, tpot_ms, rates in COLOCATED_CASES[: 1 if quick else None]:
        best, default = (worker(name, COLOCATED_GPU, each) for each in (tensor, DEFAULT_TENSOR))
        columns = "default", "shortest queue", "Cleave", "best fit", "outputs known", "saved"
        table = _table("batching, rate, share", *columns)
        for rate in rates[: 1 if quick else None]:
            for row in colocated_savings.compare(
                best, default, rate, ttft_ms, tpot_ms, 300 if quick else 2000
            ):
                against = row.default, row.shortest_queue
                table.add_row(
                    f"{row.batching}, {rate:g}, {row.share:.0%}",
                    *(
                        str(each or "-")
                        for each in (*against, row.cleave, row.best_fit, row.best_fit_known)
                    ),
                    " / ".join(
                        f"{1 - row.best_fit / each:.0%}" if each and row.best_fit else "-"
                        for each in against
                    ),
                )
                rows.append(asdict(row))
        aim = f"TTFT {ttft_ms:g} ms, TPOT {tpot_ms:g} ms"
        _print(console, f"Fewest GPUs of mixed instances for {aim}: {best.name}", table)
    return rows


def moved(console: Console, quick: bool) -> Rows:
    """Aladdin's Algorithm 2."""
    rows: Rows = []
    for name, tensor, tpot_ms in ALADDIN_CASES[: 1 if quick else None]:
        one = worker(name, "A100-SXM-80GB", tensor)
        table = _table("rate, share", *moves.WAYS)
        for rate in (10.0, 25.0, 50.0)[: 1 if quick else None]:
            for row in moves.count_workers(one, rate, tpot_ms, 500 if quick else 4000):
                counts = (str(count or "-") for count in row.workers.values())
                table.add_row(f"{rate:g}, {row.share:.0%}", *counts)
                rows.append(asdict(row))
        _print(console, f"Fewest workers for TPOT {tpot_ms:g} ms, ShareGPT: {one.name}", table)
    return rows


def measure_retained(console: Console, quick: bool) -> Rows:
    """Adapters."""
    rows: Rows = []
    prompt = traces.read("conv").prompt_tokens
    for instances in SIZES[: 1 if quick else 2]:
        table = _table("load, adapters", *(f"{worth:g} tokens" for worth in adapters.WORTHS))
        for load in (0.7, 0.9):
            for number in (8, 32, 128):
                requests = 2_000 if quick else 40_000
                found = adapters.measure(prompt, instances, load, number, requests)
                cells = (f"{row.mean_ms:.4g} ({row.brought:.0%})" for row in found)
                table.add_row(f"{load:g}, {number}", *cells)
                rows += [asdict(row) for row in found]
        title = f"{instances} instances of {adapters.SLOTS} adapters: mean delay in ms (brought)"
        _print(console, title, table)
    return rows


def costs(console: Console, quick: bool) -> Rows:
    """CPU time."""
    found = [
        cost.measure(policy, instances)
        for policy in DispatchPolicy
        for instances in (SIZES[:1] if quick else SIZES)
    ]
    table = _table("policy", "instances", "pick us", "release us")
    for row in found:
        table.add_row(row.policy, str(row.instances), f"{row.pick_us:.1f}", f"{row.release_us:.1f}")
    _print(console, "CPU time of one pick, prefill and decode together", table)
    return [asdict(row) for row in found]


def pair_costs(console: Console, quick: bool) -> Rows:
    """CPU time with pairs that the witness has closed."""
    found = [
        cost.measure_closed_pairs(prefills, decodes, closed)
        for prefills, decodes in (PAIR_SIZES[:1] if quick else PAIR_SIZES)
        for closed in cost.CLOSED
    ]
    table = _table("prefills x decodes, closed pairs", "pick us", "result us", "sweep us")
    for row in found:
        name = f"{row.prefills} x {row.decodes}, {row.closed}"
        table.add_row(name, f"{row.pick_us:.1f}", f"{row.result_us:.0f}", f"{row.sweep_us:.0f}")
    _print(console, "CPU time of one pick, of a pair's result, and of a sweep", table)
    return [asdict(row) for row in found]


def cached(console: Console, quick: bool) -> Rows:
    """Prefix caches."""
    one = worker("llama-2-70b", "H100-SXM-80GB", 4)
    columns = (
        "computed",
        "TTFT p50",
        "p99",
        "req/s",
        *(f"at {at:g}" for at in caches.LOADS),
        "p99",
    )
    rows: Rows = []
    for count in (4,) if quick else (4, 8, 16):
        for traffic in caches.read_conversations(), caches.draw_agents(500 * count):
            for name, fleet in caches.list_fleets(one, count, traffic.decode_share):
                table = _table("policy", *columns)
                for row in caches.compare(name, fleet, traffic):
                    table.add_row(
                        row.policy,
                        f"{row.computed:.3f}",
                        f"{row.ttft_p50_ms:.0f}",
                        f"{row.ttft_p99_ms:.0f}",
                        f"{row.goodput:.2f}",
                        *(f"{ratio:.3f}" for ratio in row.mean_ttft_ratios),
                        " ".join(f"{ratio:.3f}" for ratio in row.p99_ttft_ratios),
                    )
                    rows.append(asdict(row))
                aims = traffic.targets
                _print(
                    console,
                    f"{name}: {one.name}; {traffic.name}, TTFT {aims.ttft_ms / 1000:g} s, TPOT"
                    f" {aims.tpot_ms:g} ms, 90 %",
                    table,
                )
    least = caches.compute_least_share(caches.read_trace())
    console.print(f"Mooncake, one cache without limit: {least:.3f} computed")
    return rows


def viewed(console: Console, quick: bool) -> Rows:
    """What seeing all caches would bring."""
    one = worker("llama-2-70b", "H100-SXM-80GB", 4)
    table = _table("instances", "scheduling", "sent", "seen", "ratio", "difference", "error")
    rows: Rows = []
    for count, draws in ((4, 2),) if quick else ((4, 40), (8, 20), (16, 10)):
        for row in cache_views.compare_views(one, count, draws):
            table.add_row(
                row.fleet,
                row.scheduling,
                f"{row.sent:.2f}",
                f"{row.seen:.2f}",
                f"{row.sent / row.seen:.3f}" if row.seen else "-",
                f"{row.difference:+.3f}",
                f"{row.error:.3f}",
            )
            rows.append(asdict(row))
    _print(console, f"{one.name}; agent sessions: goodput, req/s; attainment", table)
    return rows


SECTIONS: dict[str, Callable[[Console, bool], Rows]] = {
    "queues": queues,
    "gateways": gateways,
    "processes": together,
    "goodput": goodputs,
    "best-fit": shared,
    "savings": saved,
    "colocated": saved_colocated,
    "moves": moved,
    "adapters": measure_retained,
    "cost": costs,
    "pairs": pair_costs,
    "caches": cached,
    "views": viewed,
}


def _print_cells(
    console: Console, title: str, cells: Sequence[Cell], column: Callable[[Cell], str]
) -> None:
    rows: dict[str, list[str]] = {}
    for cell in cells:
        ratio = "-" if cell.of_bound is None else f"{cell.of_bound:.2f}"
        text = f"{cell.mean_ms:.3g} / {cell.p99_ms:.4g} ({ratio})"
        rows.setdefault(cell.way, []).append(text)
    table = _table("way", *dict.fromkeys(column(cell) for cell in cells))
    for way, row in rows.items():
        table.add_row(way, *row)
    _print(console, title, table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at == 0 else "right")
    return table


def _print(console: Console, title: str, table: Table) -> None:
    console.print(f"\n{title}")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", choices=[*SECTIONS, []], default=[])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("-o", "--output", type=Path, help="also as JSON into this file")
    args = parser.parse_args(arguments)
    console = Console(width=WIDTH)
    found = {}
    for name in args.sections or SECTIONS:
        found[name] = SECTIONS[name](console, args.quick)
    if args.output is not None:
        args.output.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
