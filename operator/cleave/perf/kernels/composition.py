"""A model's operators on one GPU from tables of kernels, for every tensor parallel size.

Called by cleave.perf.estimator for models that were not measured themselves. The result is the same
`Operators` that the operator profiler measures, so that iteration times are composed in one place
(cleave.perf.profile.operator_fit). What is hard: tables have neither norms nor sampling, which are
estimated from bytes and the shortest kernel, nor every shape of experts; None says so.
"""

from dataclasses import dataclass

import numpy as np

from cleave.perf.hardware.expert_group import ExpertGroup
from cleave.perf.kernels import tables as kernel_tables
from cleave.perf.kernels.tables import Floats, KernelTables
from cleave.perf.model.attention import LatentAttention
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.model.quantization import Quantization, WeightPart
from cleave.perf.profile import operator_fit
from cleave.perf.profile.profile import (
    CommunicationPoint,
    DecodeAttentionPoint,
    LinearPoint,
    Operators,
    PrefillAttentionPoint,
)
from cleave.perf.roofline import operators
from cleave.perf.roofline.efficiency import select_efficiency
from cleave.perf.roofline.roofline import VLLM

ELEMENT_WISE_SHARE = 0.8
"""Share of bandwidth of norms, rotation and activation; aiconfigurator assumes the same."""
ELEMENT_WISE_KERNELS = 4
"""Of one layer, fused as vLLM compiles them: two norms with residual, rotation with the write to
the KV cache, activation."""
_NORMS = 2
"""Of these, the ones that are part of fused all-reduces."""
_MXFP4_BITS = 4.25
_SAMPLER_BYTES = 12
"""Moved for every logit: it is widened to 32 bits, normalised and searched."""
ROWS = np.array(
    [
        *(1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256),
        *(320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584),
        *(4096, 5120, 6144, 7168, 8192, 10240, 12288, 14336, 16384, 24576, 32768),
    ],
    np.float64,
)
_DEEPSEEK = (7168, LatentAttention(512, 64, 128, 128, 1536))
"""Hidden size and projections for which the source measured latent attention."""


def build_operators(
    shape: ModelShape, tables: KernelTables, tensor: int, group: ExpertGroup | None = None
) -> Operators | None:
    """The operators of `shape` on one of `tensor` GPUs; None: a kernel of it was not measured.
    `group`: how experts are shared; None: as slices over these GPUs."""
    layer = _list_products(shape, tables, tensor, group)
    attention = _build_attention(shape, tables, tensor)
    head = _predict_head(shape, tables, tensor)
    reduce = _list_all_reduces(shape, tables, tensor)
    if layer is None or attention is None or head is None or reduce is None:
        return None
    layer["element_wise"] = predict_element_wise_ms(shape, tables, tensor, ROWS)
    prefill, decode = attention
    return Operators(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        activation_bytes=shape.dtype_bytes,
        pass_overhead_ms=VLLM.iteration_ms,
        layer=tuple(
            point for name in sorted(layer) for point in _list_points(name, tensor, layer[name])
        ),
        once=_list_points(operator_fit.LM_HEAD, tensor, head),
        prefill_attention=prefill,
        decode_attention=decode,
        all_reduce=reduce,
    )


def _list_points(name: str, tensor: int, ms: Floats) -> tuple[LinearPoint, ...]:
    return tuple(
        LinearPoint(operator=name, tensor_parallel_size=tensor, tokens=int(rows), ms=float(each))
        for rows, each in zip(ROWS, ms, strict=True)
    )


@dataclass(frozen=True, slots=True)
class ProductSides:
    """A matrix product that some layers have."""

    name: str
    kind: int
    """Numeric type, of cleave.perf.kernels.tables."""
    n: int
    k: int
    layers: int
    """Number of layers that have it."""


def select_types(shape: ModelShape) -> tuple[int, int] | None:
    """Numeric types of (linear layers, experts); None: not among the tables."""
    quantization = shape.quantization
    if shape.dtype_bytes != 2:
        return None
    if quantization is None:
        return kernel_tables.BFLOAT16, kernel_tables.EXPERTS_BFLOAT16
    types = _select_quantized(quantization)
    if types is None or quantization.get_bits(WeightPart.ATTENTION) == quantization.weight_bits:
        return None if types is None or not types[0] else (types[0], types[1])
    # Attention in 16 bits beside experts of fewer, as in gpt-oss; other mixtures have no tables.
    is_plain = quantization.is_experts_only and quantization.get_bits(WeightPart.SHARED) is None
    return (kernel_tables.BFLOAT16, types[1]) if is_plain and shape.experts else None


def _select_quantized(quantization: Quantization) -> tuple[int | None, int] | None:
    """Numeric types of (linear layers, experts) whose weights are all quantised alike; None: not
    among the tables."""
    if quantization.weight_bits == _MXFP4_BITS:
        return None, kernel_tables.EXPERTS_MXFP4
    if quantization.is_4_bit_compute:
        return kernel_tables.NVFP4, kernel_tables.EXPERTS_NVFP4
    if quantization.is_integer or not quantization.is_8_bit_compute:
        return None
    if quantization.is_blockwise:
        return kernel_tables.FP8, kernel_tables.EXPERTS_FP8_BLOCK
    return kernel_tables.FP8, kernel_tables.EXPERTS_FP8


def list_product_sides(shape: ModelShape, tensor: int) -> list[ProductSides] | None:
    """The matrix products of the layers on one GPU, as vLLM joins them; without routed experts and
    without the projections of latent attention, which are measured with it. None: other types, or
    layers of other kinds."""
    if (types := select_types(shape)) is None or not shape.has_plain_layers:
        return None
    linear, hidden, layers = types[0], shape.hidden_size, shape.num_layers
    gates = 2 if shape.has_gated_mlp else 1
    found: list[ProductSides] = []
    if shape.latent is None:
        heads = shape.num_attention_heads // tensor * shape.head_size
        kv_heads = -(-shape.num_kv_heads // tensor) * shape.head_size
        found.append(ProductSides("qkv", linear, heads + 2 * kv_heads, hidden, layers))
        found.append(ProductSides("out", linear, hidden, heads, layers))
    experts = shape.experts
    if dense := experts.dense_layers if experts else layers:
        inner = shape.intermediate_size // tensor
        found.append(ProductSides("mlp_up", linear, gates * inner, hidden, dense))
        found.append(ProductSides("mlp_down", linear, hidden, inner, dense))
    if experts is not None:
        sparse, router = layers - dense, kernel_tables.BFLOAT16
        found.append(ProductSides("router", router, experts.count, hidden, sparse))
        if shared := experts.shared_intermediate_size // tensor:
            found.append(ProductSides("shared_up", linear, gates * shared, hidden, sparse))
            found.append(ProductSides("shared_down", linear, hidden, shared, sparse))
    return found


def predict_sampler_ms(shape: ModelShape, tables: KernelTables, heads: float) -> float:
    """Sampling for `heads` requests, estimated from bytes."""
    return heads * shape.vocab_size * _SAMPLER_BYTES / _read_bytes_per_ms(tables)


def predict_element_wise_ms(
    shape: ModelShape, tables: KernelTables, tensor: int, rows: Floats
) -> Floats:
    """Norms, residuals, rotation and activation of one layer, estimated from bytes, with the
    all-reduce of norms over all heads."""
    moved = operators.compute_element_wise_bytes(shape, tensor) / shape.num_layers
    sizes = rows * operators.compute_all_reduce_bytes(shape, 1.0)
    started = ELEMENT_WISE_KERNELS - _NORMS * tables.are_fused(sizes, tensor)
    start_ms = started * tables.smallest_kernel_ms
    ms = np.asarray(start_ms + rows * moved / _read_bytes_per_ms(tables))
    if shape.norms_all_heads and tensor > 1:
        sums = tables.predict_all_reduce_ms(rows * operators.NORM_BYTES, tensor)
        return ms if sums is None else ms + sums
    return ms


def _list_products(
    shape: ModelShape, tables: KernelTables, tensor: int, group: ExpertGroup | None
) -> dict[str, Floats] | None:
    """ms by rows of the matrix products and experts of a mean layer, by name."""
    types, sides = select_types(shape), list_product_sides(shape, tensor)
    if types is None or sides is None:
        return None
    found: dict[str, Floats] = {}
    for product in sides:
        ms = tables.predict_product_ms(product.kind, ROWS, product.n, product.k)
        if ms is None:
            return None
        found[product.name] = ms * product.layers / shape.num_layers
    if (experts := shape.experts) is not None:
        ms = _predict_experts(shape, tables, types[1], tensor, group)
        if ms is None:
            return None
        share = 1 - experts.dense_layers / shape.num_layers
        found["experts"] = ms * share
        if group is not None and group.data > 1:
            sent = [
                group.compute_exchange_ms(n, shape.hidden_size, experts.per_token) for n in ROWS
            ]
            found["all_to_all"] = np.array(sent) * share
    return found


def _predict_experts(
    shape: ModelShape, tables: KernelTables, kind: int, tensor: int, group: ExpertGroup | None
) -> Floats | None:
    """The routed experts of a layer on one GPU, by rows of each rank. None: no experts of this
    shape were measured. Whole experts on `gpus` GPUs take that share of the time of all on one GPU
    with the rows of all ranks, weights and products alike, besides the start of their kernels: the
    source measured other distributions of tokens over GPUs."""
    experts = shape.experts
    assert experts is not None
    sizes = (experts.intermediate_size, experts.per_token, experts.count)
    slices = tensor if group is None else 1 if group.is_whole else group.gpus.gpus
    rows = ROWS if group is None else ROWS * group.data * group.imbalance
    ms = tables.predict_experts_ms((kind, shape.hidden_size, *sizes, slices), rows)
    if ms is None or group is None or not group.is_whole:
        return ms
    start_ms = select_efficiency(tables.gpu).experts.kernel_ms
    return np.asarray(start_ms + np.maximum(ms - start_ms, 0.0) / group.gpus.gpus)


def _predict_head(shape: ModelShape, tables: KernelTables, tensor: int) -> Floats | None:
    """LM head and sampler by requests."""
    vocabulary = shape.vocab_size // tensor
    ms = tables.predict_product_ms(kernel_tables.BFLOAT16, ROWS, vocabulary, shape.hidden_size)
    return None if ms is None else ms + predict_sampler_ms(shape, tables, 1) * ROWS


def _read_bytes_per_ms(tables: KernelTables) -> float:
    return tables.gpu.memory_gbps * 1e6 * ELEMENT_WISE_SHARE


Attention = tuple[tuple[PrefillAttentionPoint, ...], tuple[DecodeAttentionPoint, ...]]


def _build_attention(shape: ModelShape, tables: KernelTables, tensor: int) -> Attention | None:
    """Points of a mean layer: with sliding windows, some layers read less than the others."""
    if shape.latent is not None:
        latent = _find_latent(shape, tables, tensor)
        return None if latent is None else _list_attention_points(tables, tensor, *latent)
    heads, kv_heads = shape.num_attention_heads // tensor, -(-shape.num_kv_heads // tensor)
    suffix = _select_kv_suffix(shape)
    means: list[Floats] = []
    for kind in ("prefill", "decode"):
        total: Floats | float = 0.0
        for window, layers in shape.list_windows():
            found = tables.find_attention(kind + suffix, shape.head_size, window, heads, kv_heads)
            if found is None:
                return None
            total = total + found[0] * found[1] * layers / shape.num_layers
        means.append(np.asarray(total))
    return _list_attention_points(tables, tensor, *means)


def _find_latent(
    shape: ModelShape, tables: KernelTables, tensor: int
) -> tuple[Floats, Floats] | None:
    if (shape.hidden_size, shape.latent) != _DEEPSEEK:
        return None
    if (types := select_types(shape)) is None:
        return None
    key = (int(types[0] == kernel_tables.FP8), shape.num_attention_heads // tensor)
    suffix = _select_kv_suffix(shape)
    prefill = tables.tables.get(f"latent_prefill{suffix}", {}).get(key)
    decode = tables.tables.get(f"latent_decode{suffix}", {}).get(key)
    return None if prefill is None or decode is None else (prefill, decode)


def _select_kv_suffix(shape: ModelShape) -> str:
    """Of the tables of attention that read KV of the model's type."""
    return kernel_tables.FP8_KV if shape.kv_dtype_bytes == 1 else ""


def _list_attention_points(
    tables: KernelTables, tensor: int, prefill: Floats, decode: Floats
) -> Attention:
    axes = tables.axes
    prompts = tuple(
        PrefillAttentionPoint(tensor_parallel_size=tensor, tokens=int(tokens), ms=float(ms))
        for tokens, ms in zip(axes["prompts"], prefill, strict=True)
        if ms == ms
    )
    decoding = tuple(
        DecodeAttentionPoint(
            tensor_parallel_size=tensor,
            batch=int(batch),
            context_tokens=int(batch * context),
            ms=float(decode[i, j]),
        )
        for i, batch in enumerate(axes["batches"])
        for j, context in enumerate(axes["contexts"])
        if decode[i, j] == decode[i, j]
    )
    return prompts, decoding


def _list_all_reduces(
    shape: ModelShape, tables: KernelTables, tensor: int
) -> tuple[CommunicationPoint, ...] | None:
    if tensor == 1:
        return ()
    sizes = ROWS * operators.compute_all_reduce_bytes(shape, 1.0)
    ms = tables.predict_all_reduce_ms(sizes, tensor)
    if ms is None:
        return None
    return tuple(
        CommunicationPoint(gpus=tensor, size_bytes=int(size), ms=float(each))
        for size, each in zip(sizes, ms, strict=True)
    )
