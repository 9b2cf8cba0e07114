"""All rows of the source's tables, for comparison with what Cleave's tables predict.

Sums of these rows are the reference of a pass. Between rows, the logarithm of the time is
interpolated over the logarithms of the sizes: not the way that Cleave interpolates.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import source

from cleave.perf.kernels import composition
from cleave.perf.kernels.tables import KernelTables
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.roofline.roofline import VLLM

Floats = np.ndarray[Any, Any]


class SourceTables:
    """The complete tables of one GPU."""

    def __init__(self, root: Path, gpu: str) -> None:
        self._root, self._system = root, source.SYSTEMS[gpu]

    def read(self, kind: str, name: str) -> source.Columns:
        found = source.find_table(self._root, self._system, kind, name)
        assert found is not None
        columns = dict(source.read_columns(found[0]))
        columns.setdefault("window_size", np.zeros(len(columns["latency"]), np.int64))
        return columns

    @cached_property
    def gemm(self) -> source.Columns:
        return self.read("gemm", "gemm")

    @cached_property
    def prefill(self) -> source.Columns:
        rows = self.read("attention", "context_attention")
        return source.select(rows, batch_size=1, kv_cache_dtype="bfloat16")

    @cached_property
    def decode(self) -> source.Columns:
        rows = self.read("attention", "generation_attention")
        return source.select(rows, kv_cache_dtype="bfloat16")

    @cached_property
    def experts(self) -> source.Columns:
        rows = self.read("moe", "moe")
        names = set(map(str, rows["distribution"]))
        routing = next(name for name in source.ROUTING if name in names)
        return source.select(rows, moe_ep_size=1, distribution=routing)

    def read_latent(self, name: str) -> source.Columns:
        """DeepSeek-V3's attention with KV of 16 bits; `name`: context or generation."""
        rows = self.read("mla", f"mla_{name}_module")
        kept = {"kv_cache_dtype": "bfloat16", "mla_dtype": "bfloat16"}
        return source.select(rows, model="deepseek-ai/DeepSeek-V3", **kept)

    @cached_property
    def all_reduce(self) -> source.Columns:
        return source.select_all_reduces(self.read("comm", "custom_allreduce"), source.REDUCE)

    @cached_property
    def fused_all_reduce(self) -> source.Columns:
        """All-reduces of TensorRT-LLM, whose kernel vLLM fuses with norms."""
        found = source.find_table(self._root, self._system, "comm", "custom_allreduce", "trtllm")
        assert found is not None
        return source.select_all_reduces(source.read_columns(found[0]), source.FUSED_REDUCE)

    @cached_property
    def _grids(self) -> dict[str, tuple[Floats, Floats, Floats]]:
        return {}

    def predict_product_ms(self, kind: str, rows: float, n: int, k: int) -> float:
        """One matrix product."""
        if kind not in self._grids:
            self._grids[kind] = _build_grid(source.select(self.gemm, gemm_dtype=kind))
        rows_axis, sides, logs = self._grids[kind]
        at = [(rows_axis, rows), (sides, n), (sides, k)]
        total = 0.0
        for (i, a), (j, b), (m, c) in _iter_corners(at):
            total += a * b * c * logs[i, j, m]
        beyond = max(rows / rows_axis[-1], 1) * max(n / sides[-1], 1) * max(k / sides[-1], 1)
        return float(np.exp(total)) * beyond


def _iter_corners(at: list[tuple[Floats, float]]) -> Any:
    import itertools

    sides = []
    for axis, value in at:
        position = float(np.interp(np.log(value), np.log(axis), np.arange(len(axis))))
        low = min(int(position), len(axis) - 2)
        sides.append([(low, 1 - position + low), (low + 1, position - low)])
    return itertools.product(*sides)


def _build_grid(rows: source.Columns) -> tuple[Floats, Floats, Floats]:
    axis, sides = np.unique(rows["m"]), np.unique(rows["n"])
    logs = np.full((len(axis), len(sides), len(sides)), np.nan)
    places = [np.searchsorted(axis, rows["m"])]
    places += [np.searchsorted(sides, rows[name]) for name in ("n", "k")]
    logs[tuple(places)] = np.log(rows["latency"])
    for i in range(1, len(axis)):  # a gap grows as its neighbour does
        gap = np.isnan(logs[i])
        logs[i][gap] = logs[i - 1][gap] + np.log(axis[i] / axis[i - 1])
    for j in range(len(sides)):
        for k in range(len(sides)):
            if np.isnan(logs[0, j, k]):
                logs[:, j, k] = logs[:, j, k - 1]
    return axis.astype(float), sides.astype(float), logs


def interpolate(xs: Floats, ms: Floats, at: float) -> float:
    """Time at `at`, by logarithms."""
    order = np.argsort(xs)
    xs, ms = xs[order].astype(float), ms[order]
    return float(np.exp(np.interp(np.log(at), np.log(xs), np.log(ms))))


class ReferencePass:
    """The sum of a model's kernels, and of what no table has, as Cleave estimates it."""

    def __init__(self, rows: SourceTables, tables: KernelTables, shape: ModelShape, tensor: int):
        self._rows, self._tables, self._shape, self._tensor = rows, tables, shape, tensor

    def predict_prefill_ms(self, tokens: int) -> float:
        shape = self._shape
        attention = 0.0
        for window, layers in shape.list_windows():
            of = self._select_heads(self._rows.prefill, window)
            longest = of["isl"].max()
            ms = interpolate(of["isl"], of["latency"], min(tokens, longest))
            attention += layers * ms * max(tokens / longest, 1) ** (1 if window else 2)
        return attention + self._sum_rows(tokens, 1)

    def predict_decode_ms(self, batch: int, context: int) -> float:
        shape = self._shape
        attention = 0.0
        for window, layers in shape.list_windows():
            of = source.select(self._select_heads(self._rows.decode, window), batch_size=batch)
            longest = of["step"].max() + 1
            ms = interpolate(of["step"] + 1, of["latency"], min(context, longest))
            attention += layers * ms * max(context / longest, 1) ** (0 if window else 1)
        return attention + self._sum_rows(batch, batch)

    def _select_heads(self, rows: source.Columns, window: int) -> source.Columns:
        shape, tensor = self._shape, self._tensor
        return source.select(
            rows,
            head_dim=shape.head_size,
            window_size=window,
            num_heads=shape.num_attention_heads // tensor,
            num_key_value_heads=max(shape.num_kv_heads // tensor, 1),
        )

    def _sum_rows(self, rows: int, heads: int) -> float:
        shape, tensor = self._shape, self._tensor
        sides = composition.list_product_sides(shape, tensor)
        assert sides is not None
        total = VLLM.iteration_ms
        for product in sides:
            kind = source.GEMM_TYPES[product.kind]
            ms = self._rows.predict_product_ms(kind, rows, product.n, product.k)
            total += product.layers * ms
        total += self._rows.predict_product_ms(
            "bfloat16", heads, shape.vocab_size // tensor, shape.hidden_size
        )
        total += composition.predict_sampler_ms(shape, self._tables, heads)
        element_wise_ms = composition.predict_element_wise_ms(
            shape, self._tables, tensor, np.array([float(rows)])
        )
        total += shape.num_layers * float(element_wise_ms[0])
        if shape.experts is not None:
            of = self._select_experts()
            longest = of["num_tokens"].max()
            ms = interpolate(of["num_tokens"], of["latency"], min(rows, longest))
            sparse = shape.num_layers - shape.experts.dense_layers
            total += sparse * ms * max(rows / longest, 1)
        if tensor > 1:
            size = rows * shape.hidden_size * shape.dtype_bytes
            is_fused = bool(self._tables.are_fused(np.array([size]), tensor)[0])
            reduces = self._rows.fused_all_reduce if is_fused else self._rows.all_reduce
            of = source.select(reduces, num_gpus=tensor)
            ms = interpolate(of["message_size"], of["latency"], size)
            total += 2 * shape.num_layers * ms
        return total

    def _select_experts(self) -> source.Columns:
        shape, experts = self._shape, self._shape.experts
        assert experts is not None
        types = composition.select_types(shape)
        assert types is not None
        return source.select(
            self._rows.experts,
            moe_dtype=source.MOE_TYPES[types[1]],
            hidden_size=shape.hidden_size,
            inter_size=experts.intermediate_size,
            topk=experts.per_token,
            num_experts=experts.count,
            moe_tp_size=self._tensor,
        )
