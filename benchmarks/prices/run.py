"""How wrong the planner's iteration times are on today's GPUs, before and after kernel tables.

Run from the root: `.venv/bin/python benchmarks/prices/run.py FOLDER`, with the folder `systems` of
aiconfigurator-core and pyarrow on the path. README.md gives the commands and the figures.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import kernels
import passes
import serving
from rich.console import Console
from rich.table import Table

T = TypeVar("T")
PARTS = ("kernels", "passes", "serving", "front_end")
SOURCES = ("tables", "roofline", "before")
FITTED = "H100-SXM-80GB"
"""The GPU whose runs of InferenceX gave the front end."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="the folder `systems` of the source")
    parser.add_argument("part", choices=PARTS, nargs="*")
    args = parser.parse_args()
    parts = args.part or PARTS
    if "kernels" in parts:
        show_kernels(list(kernels.iter_errors(args.root)))
    if "passes" in parts:
        show_passes(list(passes.iter_errors(args.root)))
    if "serving" in parts:
        show_serving(args.root)
    if "front_end" in parts:
        show_front_end(args.root)


def show_kernels(errors: Sequence[kernels.KernelError]) -> None:
    table = Table(title="Kernels: median absolute error of rows (90th percentile)")
    for column in ("GPU", "kernel", "rows kept", "kept", "rows left out", "left out"):
        table.add_column(column)
    for (gpu, kind), found in group(errors, lambda e: (e.gpu, e.kind)).items():
        kept = [e.error for e in found if e.is_kept]
        left_out = [e.error for e in found if not e.is_kept]
        table.add_row(
            gpu, kind, str(len(kept)), summarize(kept), str(len(left_out)), summarize(left_out)
        )
    Console(width=120).print(table)


def show_passes(errors: Sequence[passes.PassError]) -> None:
    table = Table(title="Passes: median absolute error (90th percentile; median with sign)")
    for column in ("GPU", "models", "phase", "passes", "tables", "roofline", "before"):
        table.add_column(column)
    for key, found in group(errors, lambda e: (e.gpu, e.is_sparse, e.phase)).items():
        cells = [summarize_signed([getattr(e, name) for e in found]) for name in SOURCES]
        kind = "MoE" if key[1] else "dense"
        table.add_row(str(key[0]), kind, str(key[2]), str(len(found)), *cells)
    Console(width=130).print(table)


def show_serving(root: Path) -> None:
    runs = serving.read_measurements(root)
    implausible = group([e for e in runs if not serving.is_plausible(e)], lambda e: e.model)
    errors = list(serving.iter_errors(root))
    titles = {
        "TPOT": (lambda e: e.tpot, lambda e: True),
        "TTFT at 4 requests": (lambda e: e.ttft, is_low),
        "TTFT at 4 requests, prompts of 1,024": (
            lambda e: e.ttft,
            lambda e: is_low(e) and e.measured.prompt_tokens <= 1024,
        ),
        "TTFT at 4 requests, prompts of 8,192": (
            lambda e: e.ttft,
            lambda e: is_low(e) and e.measured.prompt_tokens > 1024,
        ),
    }
    for title, (select, is_counted) in titles.items():
        counted = [e for e in errors if is_counted(e) and "tables" in e.tpot]
        show_errors(f"{title}: median absolute error (90th percentile; with sign)", counted, select)
    show_known_errors(errors)
    for model, left_out in implausible.items():
        print(f"left out: {len(left_out)} runs of {model}, too fast for their number of requests")
    without = {e.measured.model for e in errors if "tables" not in e.tpot}
    print(f"without kernel tables: {', '.join(sorted(without)) or 'none'}")


def show_errors(
    title: str,
    errors: Sequence[serving.ServingError],
    select: Callable[[serving.ServingError], dict[str, float]],
) -> None:
    """By model, runs of the planner's engine apart from those of other ones, then by GPU."""
    table = Table(title=title)
    for column in ("GPU", "model", "another engine by", "runs", *SOURCES):
        table.add_column(column)
    groups = group(errors, lambda e: (e.measured.gpu, e.measured.model, e.measured.engine.differs))
    both = group(errors, lambda e: (e.measured.gpu, "all", "any" if is_other(e) else ""))
    for names, found in [*sorted(groups.items()), *sorted(both.items())]:
        cells = [summarize_signed([select(e)[name] for e in found]) for name in SOURCES]
        table.add_row(*names, str(len(found)), *cells)
    Console(width=150).print(table)


def show_known_errors(errors: Sequence[serving.ServingError]) -> None:
    """What `cleave.perf.known_errors` says: by source and GPU, runs of the planner's engine that
    nothing was fitted to; of a GPU without any, those that differ by scheduling alone."""
    own = {e.measured.gpu for e in errors if not is_other(e)}
    errors = [
        e
        for e in errors
        if not is_other(e) or (e.measured.gpu not in own and e.measured.engine.has_known_kernels)
    ]
    table = Table(title="Trust: median (90th percentile) of runs that nothing was fitted to")
    for column in ("source", "GPU", "runs", "TPOT", "TTFT"):
        table.add_column(column)
    for source in ("tables", "roofline"):
        for gpu, found in sorted(group(errors, lambda e: e.measured.gpu).items()):
            tpot = [e.tpot[source] for e in found if source in e.tpot]
            low = [
                e for e in found if is_low(e) and not (e.measured.is_inferencex and gpu == FITTED)
            ]
            ttft = [e.ttft[source] for e in low if source in e.ttft]
            table.add_row(source, str(gpu), str(len(tpot)), summarize(tpot), summarize(ttft))
    Console(width=100).print(table)


def is_other(error: serving.ServingError) -> bool:
    """Whether the run's engine is not the one that the planner plans for."""
    return bool(error.measured.engine.differs)


def is_low(error: serving.ServingError) -> bool:
    return error.measured.batch <= serving.LOW_LOAD


def show_front_end(root: Path) -> None:
    """The fit of the front end to each GPU, and what it predicts on the others."""
    found = serving.predict_front_ends(root)
    gpus = sorted({run.gpu for run, _ in found})
    table = Table(title="Front end: median absolute error of TTFT at 4 requests")
    for column in ("fitted to", "ms", *gpus):
        table.add_column(column)
    for fitted in gpus:
        ms = serving.fit_front_end(found, fitted)
        rows = group(found, lambda pair: pair[0].gpu)
        cells = [summarize_signed([errors[ms] for _, errors in rows[gpu]]) for gpu in gpus]
        table.add_row(fitted, str(ms), *cells)
    Console(width=130).print(table)


def group(values: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    groups: dict[Any, list[T]] = defaultdict(list)
    for value in values:
        groups[key(value)].append(value)
    return groups


def summarize(errors: Sequence[float]) -> str:
    if not errors:
        return ""
    sizes = sorted(abs(each) for each in errors)
    return f"{statistics.median(sizes):.1%} ({sizes[int(0.9 * (len(sizes) - 1))]:.0%})"


def summarize_signed(errors: Sequence[float]) -> str:
    sizes = sorted(abs(each) for each in errors)
    high = sizes[int(0.9 * (len(sizes) - 1))]
    return f"{statistics.median(sizes):.1%} ({high:.0%}; {statistics.median(errors):+.0%})"


if __name__ == "__main__":
    main()
