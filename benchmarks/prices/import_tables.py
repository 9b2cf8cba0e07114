# /// script
# requires-python = ">=3.11"
# dependencies = ["numpy>=2.0", "pyarrow>=20"]
# ///
"""Writes the kernel tables that Cleave's wheel contains, from aiconfigurator's.

Run from the root: `uv run benchmarks/prices/import_tables.py FOLDER`, with the folder `systems` of
an unpacked wheel of aiconfigurator-core. README.md gives the commands.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import source
from source import AXES, Columns, Table

OUTPUT = Path(__file__).parents[2] / "operator" / "cleave" / "perf" / "kernels" / "data"
RELEASE = "aiconfigurator-core 0.12.0"
YEAR = 2026
"""Of this release; few of its tables carry the date of their measurement."""
Arrays = dict[str, Any]


def build_gemm(columns: Columns) -> Arrays:
    """`gemm_keys` (numeric type's index in GEMM_TYPES, n, k) and ms by rows."""
    types = {name: i for i, name in enumerate(source.GEMM_TYPES)}
    indices = np.array([types.get(str(name), -1) for name in columns["gemm_dtype"]])
    on_sides = np.isin(columns["n"], AXES["sides"]) & np.isin(columns["k"], AXES["sides"])
    kept = {name: column[(indices >= 0) & on_sides] for name, column in columns.items()}
    kept["type"] = indices[(indices >= 0) & on_sides]
    return name_arrays("gemm", source.build_table(kept, ("type", "n", "k"), [("m", AXES["rows"])]))


def build_prefill(columns: Columns) -> Arrays:
    """Attention of one prompt by (head size, window, heads, KV heads), for each type of KV."""
    tables: Arrays = {}
    for suffix, dtype in source.KV_TYPES.items():
        kept = keep_heads(source.select(columns, kv_cache_dtype=dtype, batch_size=1))
        table = source.build_table(kept, KEYS, [("isl", AXES["prompts"])])
        tables |= name_arrays(f"prefill{suffix}", table)
    return tables


def build_decode(columns: Columns) -> Arrays:
    """Attention of a batch with equal contexts, by the same key, for each type of KV."""
    tables: Arrays = {}
    axes = [("batch_size", AXES["batches"]), ("context", AXES["contexts"])]
    for suffix, dtype in source.KV_TYPES.items():
        kept = dict(keep_heads(source.select(columns, kv_cache_dtype=dtype)))
        kept["context"] = kept["step"] + 1
        tables |= name_arrays(f"decode{suffix}", source.build_table(kept, KEYS, axes))
    return tables


def build_latent(prompts: Columns, tokens: Columns) -> Arrays:
    """DeepSeek's whole attention with its projections, by (8-bit blocks or not, heads), for each
    type of KV."""
    return {
        name: array
        for suffix, dtype in source.KV_TYPES.items()
        for name, array in _build_latent(prompts, tokens, suffix, dtype).items()
    }


def _build_latent(prompts: Columns, tokens: Columns, suffix: str, kv_dtype: str) -> Arrays:
    tables = {}
    for name, columns in (("latent_prefill", prompts), ("latent_decode", tokens)):
        kept = dict(
            source.select(
                columns,
                kv_cache_dtype=kv_dtype,
                mla_dtype="bfloat16",
                model="deepseek-ai/DeepSeek-V3",
            )
        )
        mask = np.isin(kept["gemm_type"], ("bfloat16", "fp8_block"))
        kept = {field: column[mask] for field, column in kept.items()}
        kept["is_block"] = (kept["gemm_type"] == "fp8_block").astype(np.int64)
        if name == "latent_prefill":
            kept = dict(source.select(kept, batch_size=1))
            axes = [("isl", AXES["prompts"])]
        else:
            # These tables count the new token in their step.
            kept["context"] = kept["step"]
            axes = [("batch_size", AXES["batches"]), ("context", AXES["contexts"])]
        table = source.build_table(kept, ("is_block", "num_heads"), axes)
        tables |= name_arrays(f"{name}{suffix}", table)
    return tables


def build_experts(columns: Columns) -> Arrays:
    """Routed experts of a layer, by (type's index in MOE_TYPES, hidden size, width, experts per
    token, experts, tensor parallel size)."""
    types = {name: i for i, name in enumerate(source.MOE_TYPES)}
    found = set(map(str, columns["distribution"]))
    routing = next((name for name in source.ROUTING if name in found), source.ROUTING[-1])
    kept = dict(source.select(columns, moe_ep_size=1, distribution=routing))
    kept["type"] = np.array([types.get(str(name), -1) for name in kept["moe_dtype"]])
    mask = (kept["type"] >= 0) & (kept["moe_tp_size"] <= 16)
    kept = {name: column[mask] for name, column in kept.items()}
    keys = ("type", "hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size")
    table = source.build_table(kept, keys, [("num_tokens", AXES["tokens"])])
    return {**name_arrays("experts", table), "routing": routing}


def build_all_reduce(columns: Columns, link_gbps: float) -> Arrays:
    """All-reduces inside CUDA graphs, by GPUs, over a link of `link_gbps` GB/s."""
    kept = source.select_all_reduces(columns, source.REDUCE)
    gpus, size = kept["num_gpus"], kept["message_size"]
    reached = 2 * (gpus - 1) / gpus * size / (kept["latency"] * 1e6) / link_gbps
    slow = set(gpus[(size == size.max()) & (reached < source.LEAST_LINK_SHARE)].tolist())
    fast = ~np.isin(gpus, list(slow))
    kept = {name: column[fast] for name, column in kept.items()}
    table = source.build_table(kept, ("num_gpus",), [("message_size", AXES["messages"])])
    return name_arrays("all_reduce", table)


def build_fused_all_reduce(columns: Columns, limits: Mapping[int, float]) -> Arrays:
    """All-reduces of TensorRT-LLM, whose kernel vLLM gets from FlashInfer and fuses with norms: by
    GPUs, for those in `limits`."""
    kept = source.select_all_reduces(columns, source.FUSED_REDUCE)
    mask = np.isin(kept["num_gpus"], list(limits))
    kept = {name: column[mask] for name, column in kept.items()}
    table = source.build_table(kept, ("num_gpus",), [("message_size", AXES["messages"])])
    return name_arrays("fused_all_reduce", table)


KEYS = ("head_dim", "window_size", "num_heads", "num_key_value_heads")


def keep_heads(columns: Columns) -> Columns:
    """The rows of the head sizes and windows in `source.HEADS`."""
    windows = columns.get("window_size", np.zeros(len(columns["latency"]), np.int64))
    pairs = zip(columns["head_dim"].tolist(), windows.tolist(), strict=True)
    mask = np.array([pair in source.HEADS for pair in pairs], bool)
    return {name: c[mask] for name, c in {**columns, "window_size": windows}.items()}


def name_arrays(name: str, table: Table) -> Arrays:
    """The two arrays of a table under their names in the file; none of an empty table."""
    return {f"{name}_keys": table.keys, f"{name}_ms": table.ms} if len(table.keys) else {}


def import_system(root: Path, gpu: str, system: str) -> Arrays:
    """All arrays of one GPU, with `meta` in JSON."""
    versions: dict[str, str] = {}
    link_gbps = source.read_number(root, system, "intra_node_bw") / 1e9
    capability = source.read_number(root, system, "sm_version")
    limits = source.FUSED_LIMITS_MIB.get(capability, {})

    def read(kind: str, name: str) -> Columns | None:
        found = source.find_table(root, system, kind, name)
        if found is None:
            return None
        versions[name] = found[1]
        return source.read_columns(found[0])

    arrays: Arrays = {}
    one_table = [
        ("gemm", "gemm", build_gemm),
        ("attention", "context_attention", build_prefill),
        ("attention", "generation_attention", build_decode),
        ("moe", "moe", build_experts),
        ("comm", "custom_allreduce", lambda rows: build_all_reduce(rows, link_gbps)),
    ]
    for kind, name, build in one_table:
        if (columns := read(kind, name)) is not None:
            arrays |= build(columns)
    prompts, tokens = read("mla", "mla_context_module"), read("mla", "mla_generation_module")
    if prompts is not None and tokens is not None:
        arrays |= build_latent(prompts, tokens)
    fused = source.find_table(root, system, "comm", "custom_allreduce", "trtllm")
    if limits and fused is not None:
        arrays |= build_fused_all_reduce(source.read_columns(fused[0]), limits)
    meta = {
        "gpu": gpu,
        "source": RELEASE,
        "year": YEAR,
        "system": system,
        "license": "Apache-2.0",
        "vllm": versions,
        "routing": arrays.pop("routing", None),
        "axes": AXES,
        "fused_limits": {gpus: int(size * (1 << 20)) for gpus, size in limits.items()},
    }
    return {"meta": np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="the folder `systems` of the source")
    root = parser.parse_args().root
    OUTPUT.mkdir(exist_ok=True)
    for gpu, system in source.SYSTEMS.items():
        path = OUTPUT / f"{gpu}.npz"
        np.savez_compressed(path, **import_system(root, gpu, system))
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
