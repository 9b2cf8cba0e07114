"""LLMServingSim's four recorded runs of vLLM, predicted from its layer profiles.

    git clone https://github.com/casys-kaist/LLMServingSim                       # 5daddb2, MIT
    .venv/bin/python benchmarks/references/llmservingsim.py LLMServingSim        # predictions alone
    .venv/bin/python benchmarks/references/llmservingsim.py LLMServingSim --measured

Its profiles become `Operators`, as those of Cleave's own profiler do, and the simulator serves the
recorded arrivals, lengths and prompts. Without `--measured` only arrivals and lengths of a
recording are read. What is hard: a recording has two clocks, and data-parallel ranks share experts.
"""

import argparse
import csv
import itertools
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from cleave.api.enums import DispatchPolicy
from cleave.perf.hardware import memory
from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.model.model_shape import ModelShape, load_shape
from cleave.perf.profile import curve, operator_fit
from cleave.perf.profile.profile import (
    CommunicationPoint,
    DecodeAttentionPoint,
    LinearPoint,
    Operators,
    PrefillAttentionPoint,
    ProfilePoint,
)
from cleave.perf.roofline.roofline import VLLM
from cleave.perf.timing import EngineTiming
from cleave.simulator.fleet import SimulatedEngine, SimulatedFleet, SimulatedPool
from cleave.simulator.run import simulate
from cleave.simulator.trace import PromptBlocks, Trace

PERCENTILES = (50, 90, 95, 99)
BLOCK_TOKENS = 16
LINK_GB_PER_S, LINK_MS = 16, 0.02
"""Between two RTX PRO 6000, of the runs' cluster files (`link_bw`, `link_latency`)."""
TWICE = frozenset({"layernorm"})
"""Operators that a layer has two of."""
ONCE = frozenset({"embedding", "final_layernorm"})


@dataclass(frozen=True)
class Run:
    """One recording."""

    folder: str
    gpu: str
    model: str
    """As in Cleave's table of models."""


RUNS = (
    Run("RTXPRO6000/Llama-3.1-8B", "RTX-PRO-6000-Server", "llama-3.1-8b"),
    Run("RTXPRO6000/Qwen3-32B", "RTX-PRO-6000-Server", "qwen3-32b"),
    Run("RTXPRO6000/Qwen3-30B-A3B-Instruct-2507", "RTX-PRO-6000-Server", "qwen3-30b-a3b"),
    Run("RTX4090/Llama-3.1-8B", "RTX-4090", "llama-3.1-8b"),
)
Point = TypeVar("Point", bound=ProfilePoint)
Times = dict[str, NDArray[np.float64]]
"""TTFT and TPOT in ms, by request in order of arrival."""


def read_operators(folder: Path, shape: ModelShape, tensor: int, ranks: int) -> Operators:
    """The profile in `folder` (`tp1`, `tp2`). Data-parallel `ranks` share the experts."""
    layer, once = [], []
    for row in _read_csv(folder / "dense.csv"):
        name, ms = row["layer"], float(row["time_us"]) / 1000
        points = once if name in ONCE else layer
        ms *= 2 if name in TWICE else 1
        points.append(_build_point(name, tensor, int(row["tokens"]), ms))
    head: dict[int, float] = defaultdict(float)
    for row in _read_csv(folder / "per_sequence.csv"):
        head[int(row["sequences"])] += float(row["time_us"]) / 1000
    once += [_build_point(operator_fit.LM_HEAD, tensor, n, ms) for n, ms in sorted(head.items())]
    if shape.experts is not None:
        layer += _read_experts(folder / "moe.csv", shape, tensor, ranks)
    prefill, decode = _read_attention(folder / "attention.csv", tensor)
    return Operators(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        pass_overhead_ms=VLLM.iteration_ms,
        layer=_sort(layer),
        once=_sort(once),
        prefill_attention=_sort(prefill),
        decode_attention=_sort(decode),
        all_reduce=_build_all_reduce() if tensor > 1 else (),
    )


def _read_attention(
    file: Path, tensor: int
) -> tuple[list[PrefillAttentionPoint], list[DecodeAttentionPoint]]:
    """Iterations of a prompt alone and of decoding alone; those of both are left out."""
    prefill, decode = [], []
    for row in _read_csv(file):
        chunk, cached, batch, context = (
            int(row[name]) for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
        )
        size = {"tensor_parallel_size": tensor, "ms": float(row["time_us"]) / 1000}
        if not batch:
            prefill.append(PrefillAttentionPoint(tokens=chunk, cached_tokens=cached, **size))
        elif not chunk:
            decode.append(DecodeAttentionPoint(batch=batch, context_tokens=batch * context, **size))
    return prefill, decode


def _read_experts(file: Path, shape: ModelShape, tensor: int, ranks: int) -> Iterator[LinearPoint]:
    """Experts of one rank by its own rows, with as many rows on all other ranks, and the exchange
    of rows before and after them. Tokens choose experts evenly."""
    assert shape.experts is not None
    by_active: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in _read_csv(file):
        at, ms = float(row["tokens"]), float(row["time_us"]) / 1000
        by_active[int(row["activated_experts"])].append((at, ms))
    curves = {active: points for active, points in by_active.items() if len(points) > 1}
    for tokens in sorted({int(at) for points in curves.values() for at, _ in points}):
        active = shape.experts.count_activated(tokens * ranks) / ranks
        points = [(k, curve.interpolate(points, tokens)) for k, points in sorted(curves.items())]
        exchange_ms = 0.0
        if ranks > 1:
            row_bytes = shape.hidden_size * shape.dtype_bytes
            exchange_ms = 2 * (LINK_MS + tokens * row_bytes / (LINK_GB_PER_S * 1e6))
        yield _build_point("moe", tensor, tokens, curve.interpolate(points, active) + exchange_ms)


def _build_all_reduce() -> tuple[CommunicationPoint, ...]:
    """A ring of two over the link: each half goes once to the other and once back."""
    sizes = (1 << 10, 1 << 26)
    return tuple(
        CommunicationPoint(size_bytes=size, ms=2 * LINK_MS + size / (LINK_GB_PER_S * 1e6))
        for size in sizes
    )


def _build_point(name: str, tensor: int, tokens: int, ms: float) -> LinearPoint:
    return LinearPoint(operator=name, tensor_parallel_size=tensor, tokens=tokens, ms=ms)


def _sort(points: Sequence[Point]) -> tuple[Point, ...]:
    return tuple(sorted(points, key=lambda each: each.key))


def _read_csv(file: Path) -> Iterator[Mapping[str, str]]:
    with file.open() as lines:
        yield from csv.DictReader(lines)


def build_fleet(root: Path, run: Run) -> SimulatedFleet:
    """The engine of a recording with its flags."""
    meta = json.loads((root / "bench/examples" / run.folder / "vllm/meta.json").read_text())
    flags, shape = meta["engine_kwargs"], load_shape(run.model)
    tensor, ranks = flags["tensor_parallel_size"], flags["data_parallel_size"]
    profile = root / "profiler/perf" / run.folder.split("/")[0] / flags["model"] / "bf16"
    operators = read_operators(profile / f"tp{tensor}", shape, tensor, ranks)
    timing: EngineTiming = operator_fit.to_timing(operators, tensor)
    reserve = replace(memory.VLLM_RESERVE, utilisation=0.9)
    engine = SimulatedEngine(
        replace(timing, schedules_ahead=True),
        # One of the recordings says how much KV its engine had.
        meta.get("kv_cache", {}).get("num_kv_tokens")
        or memory.compute_kv_capacity_tokens(
            shape, find_gpu(run.gpu), tensor, 1, reserve, data=ranks
        ),
        BLOCK_TOKENS,
        max_num_seqs=flags["max_num_seqs"],
        max_num_batched_tokens=flags["max_num_batched_tokens"],
        ranks=ranks,
    )
    # vLLM gives a request to the rank with fewest waiting and running ones.
    policy = DispatchPolicy.LEAST_REQUESTS
    return SimulatedFleet(mixed=(SimulatedPool(engine, 1),), dispatch=policy)


def read_trace(root: Path, run: Run) -> Trace:
    """Arrivals as sent, lengths and prompts of a recording."""
    folder = root / "bench/examples" / run.folder / "vllm"
    requests = _read_lines(folder / "requests.jsonl")
    dataset = json.loads((folder / "meta.json").read_text())["dataset_path"]
    texts = [each["input_tok_ids"] for each in _read_lines(root / dataset)]
    sent = np.array([each["arrival_time"] for each in requests]) * 1000
    return Trace(
        sent - sent[0],
        np.array([each["input_toks"] for each in requests]),
        np.array([each["output_toks"] for each in requests]),
        blocks=_number_blocks(texts),
    )


def _number_blocks(texts: Sequence[Sequence[int]]) -> PromptBlocks:
    known: dict[tuple[int, ...], int] = {}
    numbers, starts = [], [0]
    for text in texts:
        ends = itertools.chain(range(BLOCK_TOKENS, len(text), BLOCK_TOKENS), (len(text),))
        numbers += [known.setdefault(tuple(text[:end]), len(known)) for end in ends]
        starts.append(len(numbers))
    return PromptBlocks(BLOCK_TOKENS, np.array(starts), np.array(numbers, np.int64), len(known))


def _read_lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def read_measured(root: Path, run: Run) -> Times:
    """What the recording says. Arrivals are of another clock than the rest: the least difference
    between arrival and queue is theirs, as if the quickest request had not waited at all."""
    requests = _read_lines(root / "bench/examples" / run.folder / "vllm/requests.jsonl")
    names = ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts", "output_toks")
    sent, queued, first, last, tokens = (
        np.array([each[name] for each in requests], float) for name in names
    )
    sent += np.min(queued - sent)
    gaps = np.maximum(tokens - 1, 1)
    return {"TTFT": (first - sent) * 1000, "TPOT": (last - first) * 1000 / gaps}


def predict(root: Path, run: Run) -> Times:
    """What the simulator says."""
    outcome = simulate(build_fleet(root, run), read_trace(root, run))
    return {"TTFT": outcome.ttft_ms, "TPOT": outcome.tpot_ms}


def describe(values: NDArray[np.float64]) -> list[str]:
    """Percentiles in ms."""
    return [f"{each:,.1f}" for each in np.percentile(values, PERCENTILES)]


def compare(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> list[str]:
    """Relative errors of percentiles, then the median error of requests."""
    sides = (np.percentile(side, PERCENTILES) for side in (predicted, measured))
    errors = np.divide(*sides) - 1
    each = np.median(np.abs(predicted / measured - 1))
    return [*(f"{error:+.1%}" for error in errors), f"{each:.1%}"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--measured", action="store_true", help="compare with what was recorded")
    options = parser.parse_args(arguments)
    columns = ["run", "", *(f"P{each}" for each in PERCENTILES)]
    table = Table(*columns, *(["each request"] if options.measured else []))
    for run in RUNS:
        found = predict(options.checkout, run)
        seen = read_measured(options.checkout, run) if options.measured else {}
        for name in found:
            cells = compare(found[name], seen[name]) if seen else describe(found[name])
            table.add_row(run.folder, name, *cells)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
