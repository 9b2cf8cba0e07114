"""Vidur's operator profiles (github.com/microsoft/vidur at 7d47513, MIT), read as operators."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cleave.perf.profile.profile import (
    CommunicationPoint,
    DecodeAttentionPoint,
    LinearPoint,
    Operators,
    PrefillAttentionPoint,
)

GPUS = {"a100": "A100-SXM-80GB", "h100": "H100-SXM-80GB"}
MODELS = {"7b": "llama-2-7b", "70b": "llama-2-70b"}
_PRODUCTS = {
    "attn_pre_proj": "qkv",
    "attn_post_proj": "out",
    "mlp_up_proj": "mlp_up",
    "mlp_down_proj": "mlp_down",
}
_ELEMENT_WISE = ("input_layernorm", "post_attention_layernorm", "attn_rope", "mlp_act")
_RESIDUALS = 2
_ATTENTION = "a100_Llama-2-70b_tp2_attention_commit_e2d00e9.csv"


@dataclass(frozen=True, slots=True)
class Layer:
    """Measured operators of one layer for some rows; milliseconds."""

    gpu: str
    model: str
    tensor: int
    rows: int
    products: dict[str, float]
    """By cleave.perf.roofline.operators' names."""
    element_wise_ms: float


def layers(folder: Path) -> Iterator[Layer]:
    """Every measured size of every model and GPU."""
    for gpu in GPUS:
        for size in MODELS:
            for row in _rows(folder / f"{gpu}_Llama-2-{size}-hf_mlp.csv"):
                yield Layer(
                    gpu=GPUS[gpu],
                    model=MODELS[size],
                    tensor=int(row["num_tensor_parallel_workers"]),
                    rows=int(row["num_tokens"]),
                    products={own: _median(row, name) for name, own in _PRODUCTS.items()},
                    element_wise_ms=sum(_median(row, name) for name in _ELEMENT_WISE)
                    + _RESIDUALS * _median(row, "add"),
                )


def operators_of_llama_70b(folder: Path, tensor: int = 2) -> Operators:
    """Llama-2-70B on A100 with the one tensor parallel size whose attention was published."""
    found = [
        layer
        for layer in layers(folder)
        if (layer.gpu, layer.model, layer.tensor) == (GPUS["a100"], MODELS["70b"], tensor)
    ]
    found.sort(key=lambda layer: layer.rows)
    points = [
        LinearPoint(operator=name, tensor_parallel_size=tensor, tokens=layer.rows, ms=ms)
        for name in (*_PRODUCTS.values(), "element_wise")
        for layer in found
        for ms in [layer.products.get(name, layer.element_wise_ms)]
    ]
    attention = list(_rows(folder / _ATTENTION))
    return Operators(
        num_layers=80,
        hidden_size=8192,
        layer=tuple(_sorted(points)),
        prefill_attention=tuple(_sorted(_prefill(row) for row in attention if _is_prefill(row))),
        decode_attention=tuple(_sorted(_decode(row) for row in attention if not _is_prefill(row))),
        all_reduce=tuple(_sorted(_all_reduces(folder, tensor))),
    )


def _prefill(row: dict[str, str]) -> PrefillAttentionPoint:
    return PrefillAttentionPoint(
        tensor_parallel_size=2,
        tokens=int(row["prefill_chunk_size"]),
        cached_tokens=int(row["kv_cache_size"]),
        ms=_median(row, "attn_prefill"),
    )


def _decode(row: dict[str, str]) -> DecodeAttentionPoint:
    batch = int(row["batch_size"])
    return DecodeAttentionPoint(
        tensor_parallel_size=2,
        batch=batch,
        context_tokens=batch * int(row["kv_cache_size"]),
        ms=_median(row, "attn_decode"),
    )


def _all_reduces(folder: Path, gpus: int) -> Iterator[CommunicationPoint]:
    for row in _rows(folder / "a100_dgx_all_reduce.csv"):
        if (int(row["num_workers"]), int(row["devices_per_node"])) == (gpus, gpus):
            yield CommunicationPoint(
                gpus=gpus, size_bytes=int(row["size"]), ms=_median(row, "all_reduce")
            )


def _sorted(points):
    """Ascending and each place once, as a profile wants them."""
    return [point for _, point in sorted({point.key: point for point in points}.items())]


def _is_prefill(row: dict[str, str]) -> bool:
    return row["is_prefill"] == "True"


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


def _median(row: dict[str, str], operator: str) -> float:
    return float(row[f"time_stats.{operator}.median"])
