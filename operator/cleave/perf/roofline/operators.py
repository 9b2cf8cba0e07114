"""The operators of one iteration on one GPU, derived from the model's shape (Vidur, 4.1 and 4.3).

Called by cleave.perf.roofline.roofline. Token-level operators depend on the rows of the iteration
(prompt tokens plus decoding requests); attention depends on contexts and is given per unit of
these.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cleave.perf.hardware.expert_group import ExpertGroup
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.model.quantization import WeightPart

EXPERTS = "experts"
"""The products of all routed experts of a layer, which run as one kernel."""


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """A linear layer on one GPU that runs `count` times per iteration."""

    name: str
    count: int
    flops: float
    size_bytes: float
    """Bytes of weights, inputs and outputs, each moved once."""


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Cost of the attention of all layers on one GPU."""

    prompt_flops_per_square: float
    """FLOPs per token^2 of end^2 - start^2 of a prompt chunk: causal, so half of all pairs."""
    decode_bytes_per_context_token: float
    decode_flops_per_context_token: float
    layers: int


def iter_matrix_products(
    shape: ModelShape, tensor: int, rows: float, group: ExpertGroup | None = None
) -> Iterator[MatrixProduct]:
    """The linear layers of the model for `rows` rows, without the LM head. Of experts, only the
    weights of those that some row uses are read, with even routing. `group`: how experts are
    shared; None: as slices over the `tensor` GPUs."""
    hidden, width = shape.hidden_size, shape.dtype_bytes
    value_size = shape.latent.value_head_size if shape.latent else shape.value_size
    heads_width = shape.num_attention_heads * value_size / tensor
    attention = shape.count_attention_parameters(tensor)
    out = hidden * heads_width
    width_bytes = shape.compute_attention_weight_bytes(tensor) / attention
    yield _build_product(shape, "qkv", shape.num_layers, rows, attention - out, hidden, width_bytes)
    yield _build_product(shape, "out", shape.num_layers, rows, out, hidden, width_bytes)
    sparse_layers = shape.expert_layers
    if dense_layers := shape.dense_mlp_layers:
        inner = shape.intermediate_size / tensor
        own_bytes = shape.get_bytes_per_weight(WeightPart.MLP)
        yield from _iter_mlp_products(shape, "mlp", dense_layers, rows, inner, own_bytes)
    if shape.experts is None:
        return
    experts = shape.experts
    gpus, of_all = (group.gpus.gpus, rows * group.data) if group else (tensor, rows)
    # Of a slice every GPU has all rows, of whole experts its share of them.
    pieces = 1 if group and group.is_whole else gpus
    inner = experts.intermediate_size / pieces
    weights = shape.count_expert_parameters() / pieces
    sides = experts.latent_size or hidden
    busiest = group.imbalance * pieces / gpus if group else 1.0
    yield MatrixProduct(
        EXPERTS,
        sparse_layers,
        2.0 * of_all * experts.per_token * weights * busiest,
        experts.count_activated(max(of_all, 1.0)) * weights * shape.bytes_per_weight * pieces / gpus
        + 2 * of_all * experts.per_token * (sides + inner) * width * busiest,
    )
    routing = hidden * (experts.count + 2 * experts.latent_size)
    yield _build_product(shape, "router", sparse_layers, rows, routing, hidden, width)
    if experts.shared_intermediate_size:
        shared = experts.shared_intermediate_size / tensor
        own_bytes = shape.get_bytes_per_weight(WeightPart.SHARED)
        yield from _iter_mlp_products(
            shape, "shared_experts", sparse_layers, rows, shared, own_bytes
        )


def build_lm_head(shape: ModelShape, tensor: int, rows: float) -> MatrixProduct:
    """The LM head for `rows` requests: prompts that end plus decoding requests."""
    weights = shape.lm_head_parameters / tensor
    moved = rows * (shape.hidden_size + shape.vocab_size / tensor) * shape.dtype_bytes
    moved += shape.compute_lm_head_bytes() / tensor
    return MatrixProduct("lm_head", 1, 2.0 * rows * weights, moved)


def compute_element_wise_bytes(shape: ModelShape, tensor: int) -> float:
    """Bytes that norms, residuals, rotation and activation of all layers move for one row.

    Twice per layer, a norm reads and writes the hidden state and a residual reads it twice and
    writes it once, unsharded on every GPU; rotation and activation work on the GPU's own share.
    """
    latent = shape.latent
    heads = shape.num_attention_heads + (0 if latent else shape.num_kv_heads)
    rotated = 2 * heads * (latent.rope_head_size if latent else shape.head_size) / tensor
    inner = shape.intermediate_size
    if shape.experts is not None:
        routed = shape.experts.per_token * shape.experts.intermediate_size
        inner = routed + shape.experts.shared_intermediate_size
    activated = (3 if shape.has_gated_mlp else 2) * inner / tensor
    return shape.num_layers * shape.dtype_bytes * (10 * shape.hidden_size + rotated + activated)


def build_attention(shape: ModelShape, tensor: int) -> AttentionCost:
    """Attention over all layers; the KV cache is read once for each decoding request."""
    return AttentionCost(
        prompt_flops_per_square=shape.prefill_attention_flops / 2 / tensor,
        decode_bytes_per_context_token=shape.compute_kv_bytes_on_gpu(tensor, 1),
        decode_flops_per_context_token=shape.decode_attention_flops / tensor,
        layers=shape.num_layers,
    )


NORM_BYTES = 8
"""Of a row, in the all-reduce of norms over all heads: a sum of queries and one of keys."""


def compute_all_reduce_bytes(shape: ModelShape, rows: float) -> float:
    """Bytes of one all-reduce: the hidden state of all rows. Each layer has two all-reduces."""
    return rows * shape.hidden_size * shape.dtype_bytes


def _iter_mlp_products(
    shape: ModelShape, name: str, count: int, rows: float, inner: float, width_bytes: float
) -> Iterator[MatrixProduct]:
    down = shape.hidden_size * inner
    up = shape.count_mlp_parameters(1) * inner - down
    yield _build_product(shape, f"{name}_up", count, rows, up, shape.hidden_size, width_bytes)
    yield _build_product(shape, f"{name}_down", count, rows, down, shape.hidden_size, width_bytes)


def _build_product(
    shape: ModelShape,
    name: str,
    count: int,
    rows: float,
    weights: float,
    side: float,
    bytes_per_weight: float,
) -> MatrixProduct:
    """The product with a matrix of `weights` elements, of which one side has the length `side`."""
    stored = weights * bytes_per_weight
    moved = stored + rows * (side + weights / side) * shape.dtype_bytes
    return MatrixProduct(name, count, 2.0 * rows * weights, moved)
