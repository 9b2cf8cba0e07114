"""Measured times of vLLM's kernels on one GPU, interpolated between the measured sizes.

Read by cleave.perf.kernels.composition. The files in `data` are aiconfigurator's tables
(Apache-2.0, see data/NOTICE), thinned out by benchmarks/prices/import_tables.py. What is hard: a
model's sizes are rarely the measured ones, and times jump between sizes. Interpolated is therefore
the ratio of the measured time to that of the peak rates, which changes slowly, over the logarithms
of the sizes.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any, TypeAlias

import numpy as np

from cleave.perf.hardware.gpu import Gpu, UnknownGpuError, find_gpu
from cleave.perf.hardware.link import build_node_link

Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Key: TypeAlias = tuple[int, ...]

BFLOAT16, FP8, NVFP4 = range(3)
"""Numeric types of matrix products."""
_BYTES_PER_WEIGHT = (2.0, 1.0, 0.5625)
(
    EXPERTS_BFLOAT16,
    EXPERTS_FP8,
    EXPERTS_FP8_BLOCK,
    EXPERTS_INT4,
    EXPERTS_MXFP4,
    EXPERTS_NVFP4,
) = range(6)
FP8_KV = "_fp8_kv"
"""Suffix of the tables of attention that reads KV of 8 bits."""
_SHARPNESS = 1.75
"""As of the roofline: compute and memory time join smoothly."""
_START_MS = 0.002
_REDUCED_GPUS = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class KernelTables:
    """The tables of one GPU. Times are in ms."""

    gpu: Gpu
    """As in the catalogue."""
    source: str
    """Year, name and version of the publication, and the versions of vLLM that were measured."""
    axes: dict[str, Floats]
    tables: dict[str, dict[Key, Floats]]
    """Kind -> key -> ms on the axes of the kind; NaN where nothing was measured."""
    fused_limits: dict[int, int]
    """GPUs -> bytes of the largest all-reduce that vLLM fuses with the norm behind it."""

    def predict_product_ms(self, kind: int, rows: Floats, n: int, k: int) -> Floats | None:
        """A matrix product of `rows` x k with k x n, for every number of rows; None: the GPU has no
        table of this numeric type."""
        sides = self.axes["sides"]
        corners = [
            (self.tables["gemm"].get((kind, int(sides[i]), int(sides[j]))), i, j, a * b)
            for i, a in _find_neighbours(sides, n)
            for j, b in _find_neighbours(sides, k)
        ]
        known = [(ms, i, j, weight) for ms, i, j, weight in corners if ms is not None]
        if not known:
            return None
        axis = self.axes["rows"]
        shares = sum(
            weight
            * np.log(_fill(axis, ms) / self._compute_ideal_ms(kind, axis, sides[i], sides[j]))
            for ms, i, j, weight in known
        ) / sum(weight for *_, weight in known)
        share = np.interp(np.log(rows), np.log(axis), shares)
        return np.asarray(np.exp(share) * self._compute_ideal_ms(kind, rows, n, k))

    def _compute_ideal_ms(self, kind: int, rows: Floats, n: float, k: float) -> Floats:
        tflops = self.gpu.get_tflops(kind != BFLOAT16) * (2 if kind == NVFP4 else 1)
        compute = 2 * rows * n * k / (tflops * 1e9)
        weights = n * k * _BYTES_PER_WEIGHT[kind]
        memory = (weights + 2 * rows * (n + k)) / (self.gpu.memory_gbps * 1e6)
        joined = (compute**_SHARPNESS + memory**_SHARPNESS) ** (1 / _SHARPNESS)
        return np.asarray(_START_MS + joined)

    def find_attention(
        self, kind: str, head_size: int, window: int, heads: int, kv_heads: int
    ) -> tuple[Floats, float] | None:
        """(ms on the axes of `kind`, factor on it) of the measured heads closest to these; None: no
        such head size or window. `kind`: prefill, whose work grows with the heads, or decode,
        whose work grows with the KV heads; with FP8_KV appended for KV of 8 bits."""
        table = self.tables.get(kind, {})
        of_size = [key for key in table if key[:2] == (head_size, window)]
        if not of_size:
            return None

        def distance(key: Key) -> float:
            return float(abs(np.log(key[2] / heads)) + 2 * abs(np.log(key[3] / kv_heads)))

        best = min(of_size, key=distance)
        is_prefill = kind.startswith("prefill")
        return table[best], heads / best[2] if is_prefill else kv_heads / best[3]

    def predict_all_reduce_ms(self, size_bytes: Floats, gpus: int) -> Floats | None:
        """An all-reduce inside a CUDA graph, as vLLM does it by default; None: not measured over so
        many GPUs."""
        ms = self.tables["all_reduce"].get((gpus,))
        if ms is None:
            return None
        fused = self.tables.get("fused_all_reduce", {}).get((gpus,), ms)
        axis = self.axes["messages"]
        plain_ms, fused_ms = (
            np.exp(np.interp(np.log(size_bytes), np.log(axis), np.log(_fill(axis, each))))
            for each in (ms, fused)
        )
        return np.where(self.are_fused(size_bytes, gpus), fused_ms, plain_ms)

    def are_fused(self, size_bytes: Floats, gpus: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether all-reduces of these sizes and the norms behind them are one kernel."""
        return np.asarray(size_bytes <= self.fused_limits.get(gpus, 0))

    def predict_experts_ms(self, key: Key, rows: Floats) -> Floats | None:
        """The routed experts of one layer. `key`: numeric type, hidden size, width, experts per
        token, experts, tensor parallel size. None: no experts of this shape were measured."""
        ms = self.tables["experts"].get(key)
        if ms is None:
            return None
        axis = self.axes["tokens"]
        found = np.exp(np.interp(np.log(rows), np.log(axis), np.log(_fill(axis, ms))))
        return np.asarray(found * np.maximum(rows / axis[-1], 1.0))

    @property
    def smallest_kernel_ms(self) -> float:
        """The shortest matrix product: about the start and end of any kernel in a CUDA graph."""
        return float(min(np.nanmin(ms) for ms in self.tables["gemm"].values()))


def find_tables(gpu: Gpu) -> KernelTables | None:
    """The tables of this GPU, whatever its price and power cap; None: there are none, or it has
    other rates than the catalogue's GPU of that name."""
    tables = _read_tables(gpu.name)
    if tables is None:
        return None
    rated = (gpu.memory_gbps, gpu.nvlink_gbps, round(gpu.dense_tflops * gpu.prompt_slowdown))
    known = tables.gpu
    if rated != (known.memory_gbps, known.nvlink_gbps, round(known.dense_tflops)):
        return None
    return tables if gpu.all_reduce_gbps is None else _replace_all_reduces(tables, gpu)


def _replace_all_reduces(tables: KernelTables, gpu: Gpu) -> KernelTables:
    """With the all-reduces of this host instead of the published machine's."""
    link, sizes = build_node_link(gpu), tables.axes["messages"]
    reduces: dict[Key, Floats] = {
        (gpus,): np.array([link.compute_all_reduce_ms(size, gpus) for size in sizes])
        for gpus in _REDUCED_GPUS
    }
    return replace(tables, tables={**tables.tables, "all_reduce": reduces}, fused_limits={})


@cache
def _read_tables(name: str) -> KernelTables | None:
    file = resources.files("cleave.perf.kernels") / "data" / f"{name}.npz"
    try:
        gpu = find_gpu(name)
    except UnknownGpuError:
        return None
    if not file.is_file():
        return None
    with resources.as_file(file) as path, np.load(path) as arrays:
        meta = json.loads(arrays["meta"].tobytes())
        kinds = [each.removesuffix("_keys") for each in arrays.files if each.endswith("_keys")]
        tables = {
            kind: {
                tuple(map(int, key)): ms.astype(np.float64)
                for key, ms in zip(arrays[f"{kind}_keys"], arrays[f"{kind}_ms"], strict=True)
            }
            for kind in kinds
        }
    axes = {kind: np.array(values, np.float64) for kind, values in meta["axes"].items()}
    versions = " and ".join(sorted(set(meta["vllm"].values())))
    source = f"vLLM {versions}, published {meta['year']} with {meta['source']}"
    limits = {int(gpus): size for gpus, size in meta["fused_limits"].items()}
    return KernelTables(gpu, source, axes, tables, limits)


def _find_neighbours(axis: Floats, value: float) -> list[tuple[int, float]]:
    """(index, weight) of the one or two points of `axis` beside `value`, by logarithms."""
    position = float(np.interp(np.log(value), np.log(axis), np.arange(len(axis))))
    low = int(position)
    share = position - low
    return [(low, 1 - share), (low + 1, share)] if share > 0 else [(low, 1.0)]


def _fill(axis: Floats, ms: Floats) -> Floats:
    """`ms` with its gaps interpolated and, at the ends, continued in proportion to the axis."""
    known = ~np.isnan(ms)
    filled = np.exp(np.interp(np.log(axis), np.log(axis[known]), np.log(ms[known])))
    last = int(np.flatnonzero(known)[-1])
    filled[last:] = ms[last] * axis[last:] / axis[last]
    return np.asarray(filled)
