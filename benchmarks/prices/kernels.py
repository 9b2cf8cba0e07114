"""Errors of single kernels: rows of the source that the tables keep, and those they leave out."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import source
from reference import SourceTables

from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.kernels import tables
from cleave.perf.kernels.tables import Floats, KernelTables
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
        yield from _iter_experts(gpu, found, rows)
        yield from _iter_latent(gpu, found, rows)


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
        prompts, decoding = (
            found.find_attention(kind, 128, 0, heads, kv_heads) for kind in ("prefill", "decode")
        )
        assert prompts is not None
        assert decoding is not None
        named = {"head_dim": 128, "window_size": 0}
        named |= {"num_heads": heads, "num_key_value_heads": kv_heads}
        of_prompts = source.select(rows.prefill, **named)
        columns = of_prompts["isl"], of_prompts["latency"]
        yield from _iter_prompts(gpu, "prompt attention", found, prompts[0] * prompts[1], columns)
        of_decoding = source.select(rows.decode, **named)
        of_decoding = {**of_decoding, "context": of_decoding["step"] + 1}
        ms = decoding[0] * decoding[1]
        yield from _iter_decode(gpu, "decode attention", found, ms, of_decoding)


def _iter_latent(gpu: str, found: KernelTables, rows: SourceTables) -> Iterator[KernelError]:
    prompts, decoding = rows.read_latent("context"), rows.read_latent("generation")
    for (is_block, heads), ms in found.tables["latent_prefill"].items():
        named = {"gemm_type": "fp8_block" if is_block else "bfloat16", "num_heads": heads}
        of_prompts = source.select(prompts, batch_size=1, **named)
        columns = of_prompts["isl"], of_prompts["latency"]
        yield from _iter_prompts(gpu, "prompt MLA", found, ms, columns)
        of_decoding = source.select(decoding, **named)
        of_decoding = {**of_decoding, "context": of_decoding["step"]}
        ms = found.tables["latent_decode"][is_block, heads]
        yield from _iter_decode(gpu, "decode MLA", found, ms, of_decoding)


def _iter_prompts(
    gpu: str, kind: str, found: KernelTables, ms: Floats, columns: tuple[Floats, Floats]
) -> Iterator[KernelError]:
    """`columns`: tokens and ms of the source."""
    points = [
        PrefillAttentionPoint(tokens=int(tokens), ms=float(each))
        for tokens, each in zip(found.axes["prompts"], ms, strict=True)
        if each == each
    ]
    fixed, per_token, square = operator_fit.fit_prompt_attention(points)
    for tokens, measured in zip(*columns, strict=True):
        if tokens >= LONGEST_PROMPT_FOR_FIT:
            error = (fixed + per_token * tokens + square * tokens**2) / measured - 1
            is_kept = tokens in source.PROMPTS_AXIS
            yield KernelError(gpu, kind, is_kept, float(error))


def _iter_decode(
    gpu: str, kind: str, found: KernelTables, ms: Floats, of_heads: source.Columns
) -> Iterator[KernelError]:
    points = [
        DecodeAttentionPoint(batch=int(b), context_tokens=int(b * c), ms=float(ms[i, j]))
        for i, b in enumerate(found.axes["batches"])
        for j, c in enumerate(found.axes["contexts"])
        if ms[i, j] == ms[i, j]
    ]
    table, per_context = decode_fit.fit_tables(points)
    timing = EngineTiming(1.0, (0.0, 0.0), 0.0, table, per_context)
    columns = (of_heads[name] for name in ("batch_size", "context", "latency"))
    for batch, context, measured in zip(*columns, strict=True):
        if batch <= max(source.BATCHES_AXIS) and context >= min(source.CONTEXTS_AXIS):
            error = timing.predict_decode_ms(int(batch), int(batch * context)) / measured - 1
            is_kept = context in source.CONTEXTS_AXIS and batch in source.BATCHES_AXIS
            yield KernelError(gpu, kind, is_kept, float(error))


def _iter_experts(gpu: str, found: KernelTables, rows: SourceTables) -> Iterator[KernelError]:
    """Experts of every measured shape; of MXFP4, the kernel that the source measured last."""
    for key in found.tables["experts"]:
        names = ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size")
        named = dict(zip(names, key[1:], strict=True))
        of_shape = source.select(rows.experts, moe_dtype=source.MOE_TYPES[key[0]], **named)
        tokens = of_shape["num_tokens"]
        predicted = found.predict_experts_ms(key, tokens.astype(np.float64))
        assert predicted is not None
        for count, error in zip(tokens, predicted / of_shape["latency"] - 1, strict=True):
            yield KernelError(gpu, "experts", count in source.TOKENS_AXIS, float(error))


def _iter_all_reduces(gpu: str, found: KernelTables, rows: SourceTables) -> Iterator[KernelError]:
    """Those that are not fused, and those that are."""
    for kind, reduces in (("plain", rows.all_reduce), ("fused", rows.fused_all_reduce)):
        columns = (reduces[name] for name in ("num_gpus", "message_size", "latency"))
        for gpus, size, ms in zip(*columns, strict=True):
            sizes = np.array([float(size)])
            predicted = found.predict_all_reduce_ms(sizes, int(gpus))
            is_fused = bool(found.are_fused(sizes, int(gpus))[0])
            if predicted is not None and is_fused == (kind == "fused"):
                is_kept = size in source.MESSAGES_AXIS
                error = float(predicted[0]) / ms - 1
                yield KernelError(gpu, f"all-reduce, {kind}", is_kept, error)
