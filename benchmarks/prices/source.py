"""Reads aiconfigurator's tables of vLLM's kernels and thins them out for Cleave's wheel.

The rows that are not kept test the ones that are: `run.py` predicts them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Columns = Mapping[str, np.ndarray[Any, Any]]
"""The columns of one table, all of one length."""

SYSTEMS = {
    "A100-SXM-80GB": "a100_sxm",
    "H100-SXM-80GB": "h100_sxm",
    "H200-SXM-141GB": "h200_sxm",
    "B200-SXM-180GB": "b200_sxm",
    "B300-SXM-288GB": "b300_sxm",
    "GB200-NVL": "gb200",
    "GB300-NVL": "gb300",
    "L40S": "l40s",
    "RTX-PRO-6000-Server": "rtx_pro_6000_server",
}
"""GPU of Cleave's catalogue -> folder of the source."""

ROWS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
ROWS_AXIS = (*ROWS, 8192, 16384, 32768)
SIDES_AXIS = (64, 256, 512, 1024, 2048, 3072, 4096, 5120, 7168, 8192, 12288, 16384, 65536)
PROMPTS_AXIS = (16, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
BATCHES_AXIS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONTEXTS_AXIS = (128, 512, 1024, 4096, 16384, 65536)
TOKENS_AXIS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16384)
MESSAGES_AXIS = tuple(256 * 4**i for i in range(12))
"""Bytes."""
AXES: Mapping[str, Sequence[int]] = {
    "rows": ROWS_AXIS,
    "sides": SIDES_AXIS,
    "prompts": PROMPTS_AXIS,
    "batches": BATCHES_AXIS,
    "contexts": CONTEXTS_AXIS,
    "tokens": TOKENS_AXIS,
    "messages": MESSAGES_AXIS,
}
HEADS = {(64, 0), (64, 128), (128, 0), (256, 0), (256, 1024)}
"""Head sizes and windows whose attention is kept."""
KV_TYPES = {"": "bfloat16", "_fp8_kv": "fp8"}
"""Suffix of the name of a table of attention -> type of the KV that it reads."""
GEMM_TYPES = ("bfloat16", "fp8", "nvfp4")
"""Types of matrix products. The source has 8 bits with scales of blocks as well, but measured their
launch: 0.06 ms (H200) to 0.18 ms (B200) up to 2,048 rows. From 4,096 rows on they take 0.9 to 1.1
times as long as those with scales of rows, which stand for both."""
MOE_TYPES = ("bfloat16", "fp8", "fp8_block", "int4_wo", "w4a16_mxfp4", "nvfp4")
REDUCE, FUSED_REDUCE = "vLLM_custom_graph", "TRTLLM"
"""Kernels of all-reduces: vLLM's in CUDA graphs, and the one that it gets from FlashInfer to fuse
with norms, which is TensorRT-LLM's and was measured there, without a norm."""
FUSED_LIMITS_MIB: Mapping[int, Mapping[int, float]] = {
    90: {2: 64, 4: 2, 8: 0.5},
    100: {2: 64, 4: 32, 8: 1},
    103: {2: 64, 4: 64, 8: 4},
}
"""Compute capability -> GPUs -> largest message of an all-reduce that vLLM 0.32 fuses with the norm
behind it, by default (FI_ALLREDUCE_FUSION_MAX_SIZE_MB; Apache-2.0)."""
LEAST_LINK_SHARE = 0.1
"""All-reduces whose largest message reaches less of the link are left out: L40S over 4 and 8 GPUs
was measured at 0.5 to 1 GB/s, on a host whose GPUs do not reach each other."""
ROUTING = ("power_law_1.01", "power_law_1.2", "balanced")
"""Distribution of tokens over experts, best first."""


@dataclass(frozen=True)
class Table:
    """Measured times of one kind: each key fields -> ms over the axes."""

    keys: np.ndarray[Any, Any]
    ms: np.ndarray[Any, Any]


def find_table(
    root: Path, system: str, kind: str, name: str, engine: str = "vllm"
) -> tuple[Path, str] | None:
    """The newest table of an engine and its version; None: not measured on this system."""
    found = sorted((root / "data" / system / kind / engine).glob(f"*/{name}_perf.parquet"))
    return (found[-1], found[-1].parent.name) if found else None


def read_columns(path: Path) -> Columns:
    """The columns of a parquet file."""
    from pyarrow import parquet

    table = parquet.read_table(path)
    return {name: table[name].to_numpy() for name in table.column_names}


def select(columns: Columns, **values: object) -> Columns:
    """The rows whose columns have these values."""
    mask = np.ones(len(next(iter(columns.values()))), bool)
    for name, value in values.items():
        mask &= columns[name] == value
    return {name: column[mask] for name, column in columns.items()}


def read_number(root: Path, system: str, name: str) -> int:
    """A number of the system's description."""
    found = re.search(rf"{name}: (\d+)", (root / f"{system}.yaml").read_text())
    assert found is not None
    return int(found[1])


def select_all_reduces(columns: Columns, kernel: str) -> Columns:
    """All-reduces by one kernel, with `message_size` in bytes: the source counts the elements of a
    tensor, which are of 16 bits in all of its tables."""
    kept = select(columns, kernel_source=kernel, allreduce_dtype="bfloat16")
    return {**kept, "message_size": 2 * kept["message_size"]}


def build_table(
    columns: Columns, keys: Sequence[str], axes: Sequence[tuple[str, Sequence[int]]]
) -> Table:
    """`latency` by the values of `keys`, on a grid of `axes`; NaN where nothing was measured."""
    on_axes = np.ones(len(columns["latency"]), bool)
    for name, values in axes:
        on_axes &= np.isin(columns[name], values)
    kept = {name: column[on_axes] for name, column in columns.items()}
    rows = np.stack([kept[name].astype(np.int64) for name in keys], axis=1)
    distinct, where = np.unique(rows, axis=0, return_inverse=True)
    ms = np.full((len(distinct), *(len(values) for _, values in axes)), np.nan, np.float16)
    places = [np.searchsorted(values, kept[name]) for name, values in axes]
    ms[(where.reshape(-1), *places)] = kept["latency"]
    complete = ~np.isnan(ms).all(axis=tuple(range(1, ms.ndim)))
    return Table(distinct[complete].astype(np.int32), ms[complete])
