"""Errors of `cleave.perf.hardware.all_to_all` beside the published times that it was fitted to.

    PYTHONPATH=pyarrow .venv/bin/python benchmarks/wide/exchanges.py SYSTEMS

SYSTEMS: the folder `systems` of aiconfigurator-core 0.12.0; benchmarks/prices/README.md has the
commands that fetch it and pyarrow.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cleave.perf.hardware.all_to_all import AllToAllBackend, GpuGroup, compute_all_to_all_ms
from cleave.perf.hardware.gpu import find_gpu
from cleave.perf.hardware.link import build_network_link, build_node_link

HIDDEN, PER_TOKEN, EXPERTS, SMS = 7168, 8, 256, 20
DEEPEP = "data/h200_sxm/comm/sglang/0.5.6.post2/wideep_deepep_{}_perf.parquet"
NVLINK = "data/gb200/comm/trtllm/1.3.0rc10/trtllm_alltoall_perf.parquet"
Point = tuple[AllToAllBackend, str, int, int, float]
"""Backend, GPU, GPUs of the group, tokens on each of them, microseconds of dispatch and combine."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a parquet file."""
    from pyarrow import parquet

    rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


def list_deepep(systems: Path) -> Iterator[Point]:
    """DeepEP on H200; both kernels with as many multiprocessors as vLLM gives them."""
    for row in read_rows(systems / DEEPEP.format("ll")):
        parts = (row["dispatch_avg_t_us"], row["combine_avg_t_us"])
        if row["num_experts"] == EXPERTS and all(parts):
            gpus = 8 * row["node_num"]
            yield AllToAllBackend.LOW_LATENCY, "H200", gpus, row["num_token"], sum(parts)
    for row in read_rows(systems / DEEPEP.format("normal")):
        parts = (row["dispatch_transmit_us"], row["combine_transmit_us"])
        waits = (row["dispatch_notify_us"] or 0.0) + (row["combine_notify_us"] or 0.0)
        if row["dispatch_sms"] == row["combine_sms"] == SMS and all(parts):
            gpus = 8 * row["node_num"]
            us = sum(parts) + waits
            yield AllToAllBackend.HIGH_THROUGHPUT, "H200", gpus, row["num_token"], us


def list_nvlink(systems: Path) -> Iterator[Point]:
    """TensorRT-LLM's kernel on GB200, with the preparation of its dispatch."""
    parts: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for row in read_rows(systems / NVLINK):
        kind = (row["kernel_source"], row["moe_dtype"])
        if kind == ("NVLinkTwoSided", "fp8") and "low_precision" not in row["op_name"]:
            parts[row["moe_ep_size"], row["num_tokens"]][row["op_name"]] = row["latency"]
    for (gpus, tokens), ms in parts.items():
        if len(ms) == 3 and gpus >= 8:
            yield AllToAllBackend.NVLINK, "GB200", gpus, tokens, 1e3 * sum(ms.values())


def predict_us(backend: AllToAllBackend, gpu: str, gpus: int, tokens: int) -> float:
    """The same by Cleave."""
    found = find_gpu(gpu)
    per_node = 72 if backend is AllToAllBackend.NVLINK else 8
    network = build_network_link(found, 400, 5)
    group = GpuGroup(gpus, per_node, build_node_link(found), network)
    return 1e3 * compute_all_to_all_ms(group, backend, tokens, HIDDEN, PER_TOKEN)


def main(systems: Path) -> None:
    """Print a row for each backend and number of GPUs."""
    errors: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for backend, gpu, gpus, tokens, us in (*list_deepep(systems), *list_nvlink(systems)):
        ratio = predict_us(backend, gpu, gpus, tokens) / us
        errors[str(backend), gpu, gpus].append(ratio - 1)
    table = Table("kernel", "GPU", "GPUs", "points", "mean absolute error", "mean", "largest")
    for (kernel, gpu, gpus), found in sorted(errors.items()):
        values = np.array(found)
        table.add_row(
            *(kernel, gpu, str(gpus), str(len(values)), f"{np.abs(values).mean():.1%}"),
            *(f"{values.mean():+.1%}", f"{np.abs(values).max():.1%}"),
        )
    Console(width=120).print(table)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
