"""Errors of single kernels: rows of the source that the tables keep, and those they leave out."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import source
from reference import SourceTables

from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.kernels import tables
from cleave.perf.kernels.tables import KernelTables
from cleave.perf.profile import decode_fit, operator_fit
from cleave.perf.profile.profile import DecodeAttentionPoint, PrefillAttentionPoint
from cleave.perf.timing import EngineTiming

LEAST_SIDE = 512
"""Smallest side of the compared products; smaller ones are a negligible part of any pass."""
HEADS = ((64, 8), (32, 8), (16, 2), (8, 1), (8, 8), (4, 1))
LONGEST_PROMPT_FOR_FIT = 512
"""Attention of shorter prompts is under a hundredth of their pass."""


@dataclass(frozen=True)
class KernelError:
    """One row of the source; 0.1 is 10 % too long."""

    gpu: str
    kind: str
    is_kept: bool
    error: float


def iter_errors(root: Path) -> Iterator[KernelError]:
    """Every row of matrix products and all-reduces, and attention of models' heads of 128, as the
    planner's numeric form has it: fitted over prompts, and over contexts for each batch."""
    for gpu in ("H100-SXM-80GB", "H200-SXM-141GB", "B200-SXM-180GB"):
        found = tables.find_tables(find_gpu(gpu))
        assert found is not None
        rows = SourceTables(root, gpu)
        yield from _iter_products(gpu, found, rows)
        yield from _iter_attention(gpu, found, rows)
        yield from _iter_all_reduces(gpu, found, rows)


def _iter_products(gpu: str, found: KernelTables, rows: SourceTables) -> Iterator[KernelError]:
    for index, kind in enumerate(source.GEMM_TYPES):
        of_kind = source.select(rows.gemm, gemm_dtype=kind)
        for n in np.unique(of_kind["n"]):
            for k in np.unique(of_kind["k"]):
                if min(n, k) < LEAST_SIDE:
                    continue
                measured = source.select(of_kind, n=n, k=k)
                predicted = found.predict_product_ms(
                    index, measured["m"].astype(np.float64), int(n), int(k)
                )
                if predicted is None or not len(predicted):
                    continue
                are_sides = n in source.SIDES_AXIS and k in source.SIDES_AXIS
                errors = predicted / measured["latency"] - 1
                for m, error in zip(measured["m"], errors, strict=True):
                    is_kept = are_sides and m in source.ROWS_AXIS
                    yield KernelError(gpu, f"product {kind}", is_kept, float(error))


def _iter_attention(gpu: str, found: KernelTables, rows: SourceTables) -> Iterator[KernelError]:
    for heads, kv_heads in HEADS:
        kept = found.find_attention("prefill", 128, 0, heads, kv_heads)
        assert kept is not None
        points = [
            PrefillAttentionPoint(tokens=int(tokens), ms=float(ms))
            for tokens, ms in zip(found.axes["prompts"], kept[0] * kept[1], strict=True)
        ]
        fixed, per_token, square = operator_fit.fit_prompt_attention(points)
        named = {"head_dim": 128, "window_size": 0}
        named |= {"num_heads": heads, "num_key_value_heads": kv_heads}
        of_heads = source.select(rows.prefill, **named)
        for tokens, ms in zip(of_heads["isl"], of_heads["latency"], strict=True):
            if tokens >= LONGEST_PROMPT_FOR_FIT:
                error = (fixed + per_token * tokens + square * tokens**2) / ms - 1
                is_kept = tokens in source.PROMPTS_AXIS
                yield KernelError(gpu, "prompt attention", is_kept, float(error))
        yield from _iter_decode(gpu, found, source.select(rows.decode, **named), heads, kv_heads)


def _iter_decode(
    gpu: str, found: KernelTables, of_heads: source.Columns, heads: int, kv_heads: int
) -> Iterator[KernelError]:
    kept = found.find_attention("decode", 128, 0, heads, kv_heads)
    assert kept is not None
    ms = kept[0] * kept[1]
    points = [
        DecodeAttentionPoint(batch=int(b), context_tokens=int(b * c), ms=float(ms[i, j]))
        for i, b in enumerate(found.axes["batches"])
        for j, c in enumerate(found.axes["contexts"])
        if ms[i, j] == ms[i, j]
    ]
    table, per_context = decode_fit.fit_tables(points)
    timing = EngineTiming(1.0, (0.0, 0.0), 0.0, table, per_context)
    columns = (of_heads["batch_size"], of_heads["step"] + 1, of_heads["latency"])
    for batch, context, measured in zip(*columns, strict=True):
        if batch <= max(source.BATCHES_AXIS) and context >= min(source.CONTEXTS_AXIS):
            error = timing.predict_decode_ms(int(batch), int(batch * context)) / measured - 1
            is_kept = context in source.CONTEXTS_AXIS
            yield KernelError(gpu, "decode attention", is_kept, float(error))


def _iter_all_reduces(gpu: str, found: KernelTables, rows: SourceTables) -> Iterator[KernelError]:
    columns = (rows.all_reduce[name] for name in ("num_gpus", "message_size", "latency"))
    for gpus, size, ms in zip(*columns, strict=True):
        predicted = found.predict_all_reduce_ms(np.array([float(size)]), int(gpus))
        if predicted is not None:
            is_kept = size in source.MESSAGES_AXIS
            yield KernelError(gpu, "all-reduce", is_kept, float(predicted[0]) / ms - 1)
