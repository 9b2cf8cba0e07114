"""LLMServingSim's profiles of single layers as operators of Cleave.

What is hard: data-parallel ranks share experts, whose times depend on how many of them are in use.
"""

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from cleave.perf.model.model_shape import ModelShape
from cleave.perf.profile import curve, operator_fit
from cleave.perf.profile.profile import (
    CommunicationPoint,
    DecodeAttentionPoint,
    LinearPoint,
    MixedAttentionPoint,
    Operators,
    PrefillAttentionPoint,
    ProfilePoint,
)
from cleave.perf.roofline.roofline import VLLM

LINK_GB_PER_S, LINK_MS = 16, 0.02
"""Between two RTX PRO 6000, of the runs' cluster files (`link_bw`, `link_latency`)."""
TWICE = frozenset({"layernorm"})
"""Operators that a layer has two of."""
ONCE = frozenset({"embedding", "final_layernorm"})
Point = TypeVar("Point", bound=ProfilePoint)


def read_operators(folder: Path, shape: ModelShape, tensor: int, ranks: int) -> Operators:
    """The profile in `folder` (`tp1`, `tp2`). Data-parallel `ranks` share the experts."""
    layer, once = [], []
    for row in read_csv(folder / "dense.csv"):
        name, ms = row["layer"], float(row["time_us"]) / 1000
        points = once if name in ONCE else layer
        ms *= 2 if name in TWICE else 1
        points.append(_build_point(name, tensor, int(row["tokens"]), ms))
    head: dict[int, float] = defaultdict(float)
    for row in read_csv(folder / "per_sequence.csv"):
        head[int(row["sequences"])] += float(row["time_us"]) / 1000
    once += [_build_point(operator_fit.LM_HEAD, tensor, n, ms) for n, ms in sorted(head.items())]
    if shape.experts is not None:
        layer += _read_experts(folder / "moe.csv", shape, tensor, ranks)
    prefill, decode, mixed = _read_attention(folder / "attention.csv", tensor)
    return Operators(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        pass_overhead_ms=VLLM.iteration_ms,
        layer=_sort(layer),
        once=_sort(once),
        prefill_attention=_sort(prefill),
        decode_attention=_sort(decode),
        mixed_attention=_sort(mixed),
        all_reduce=_build_all_reduce() if tensor > 1 else (),
    )


def _read_attention(
    file: Path, tensor: int
) -> tuple[list[PrefillAttentionPoint], list[DecodeAttentionPoint], list[MixedAttentionPoint]]:
    """Of a prompt alone, of decoding alone, and of both."""
    prefill, decode, mixed = [], [], []
    for row in read_csv(file):
        chunk, cached, batch, context = (
            int(row[name]) for name in ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")
        )
        size = {"tensor_parallel_size": tensor, "ms": float(row["time_us"]) / 1000}
        prompt = {"tokens": chunk, "cached_tokens": cached}
        decoding = {"batch": batch, "context_tokens": batch * context}
        if not batch:
            prefill.append(PrefillAttentionPoint(**prompt, **size))
        elif not chunk:
            decode.append(DecodeAttentionPoint(**decoding, **size))
        else:
            mixed.append(MixedAttentionPoint(**prompt, **decoding, **size))
    return prefill, decode, mixed


def _read_experts(file: Path, shape: ModelShape, tensor: int, ranks: int) -> Iterator[LinearPoint]:
    """Experts of one rank by its own rows, with as many rows on all other ranks, and the exchange
    of rows before and after them. Tokens choose experts evenly."""
    assert shape.experts is not None
    by_active: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for row in read_csv(file):
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


def read_csv(file: Path) -> Iterator[Mapping[str, str]]:
    """The rows of a file, by column."""
    with file.open() as lines:
        yield from csv.DictReader(lines)
