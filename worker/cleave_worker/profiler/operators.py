"""Operators of a layer: matrix products, norms, activations, attention (Vidur, section 4.3).

The time of token-level operators depends only on the number of rows in an iteration. Experts are
special: an iteration of n tokens uses some of them, each with a few rows, and must read the weights
of all it uses; they run as one batched product over the experts that even routing uses.

Attention of prompts runs torch's fused kernel. Decoding runs two products and a softmax over
contiguous KV, which reads every key and value once, as paged kernels do; it is bound by that
reading.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from cleave.perf.model.model_shape import ModelShape
from cleave_worker.profiler.clock import RunOperator

BuildRun = Callable[[int], RunOperator]
"""Builds an operator for a number of rows."""

_CACHE_BYTES = 256 << 20
"""Minimum bytes of the copies of weights: several times the largest L2 cache."""
_MAX_COPIES = 64


class ShardError(ValueError):
    """The model cannot be measured this way; one line with the reason."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One layer of `shape` on one of `size` GPUs (Vidur, section 4.3): a smaller layer, so one GPU
    alone can measure every size."""

    shape: ModelShape
    size: int

    def __post_init__(self) -> None:
        """Raises ShardError for models that cannot be sharded or measured so."""
        shape = self.shape
        if shape.latent is not None:
            raise ShardError(f"{shape.name}: latent attention (MLA) is not measured yet")
        if shape.quantization is not None:
            raise ShardError(
                f"{shape.name}: quantised weights are not measured yet; name the model's original"
            )
        if shape.num_attention_heads % self.size:
            raise ShardError(
                f"{shape.name}: {shape.num_attention_heads} attention heads cannot be sharded over "
                f"{self.size} GPUs; leave that size out"
            )

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.shape.num_attention_heads // self.size

    @property
    def kv_heads(self) -> int:
        """Number of KV heads; replicated when there are fewer than GPUs."""
        return max(1, self.shape.num_kv_heads // self.size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of key and value of this layer."""
        return 2 * self.kv_heads * self.shape.head_size * self.shape.kv_dtype_bytes

    def get_mlp_width(self, width: int) -> int:
        """Return the width per GPU of an MLP that is `width` wide on all GPUs together."""
        return -(-width // self.size)


@dataclass(frozen=True, slots=True)
class LinearOperator:
    """One operator, and how often the average layer runs it."""

    name: str
    build_run: BuildRun
    weight: float = 1.0
    """Runs per layer; below 1 where only some layers have it."""


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """Device and data type of the measured operators."""

    device: torch.device
    dtype: torch.dtype

    def make_tensor(self, *sizes: int) -> torch.Tensor:
        """Return small random numbers: zeros would draw less power and so run faster."""
        return torch.randn(*sizes, device=self.device, dtype=self.dtype) * 0.02

    def make_copies(self, *sizes: int) -> torch.Tensor:
        """Return several tensors of these sizes, stacked along the first dimension."""
        num_bytes = math.prod(sizes) * self.dtype.itemsize
        num_copies = 1 if self.device.type == "cpu" else -(-_CACHE_BYTES // num_bytes)
        return self.make_tensor(min(num_copies, _MAX_COPIES), *sizes)


def build_layer_operators(shard: Shard, device_spec: DeviceSpec) -> Iterator[LinearOperator]:
    """Yield the token-level operators of one layer, lazily: only one of them occupies memory."""
    shape = shard.shape
    hidden, size = shape.hidden_size, shape.head_size
    qkv = (shard.heads + 2 * shard.kv_heads) * size
    yield LinearOperator("norm", _build_norm(device_spec, hidden), 2)
    yield LinearOperator("qkv", _build_product(device_spec, hidden, qkv))
    if not shape.learned_positions:
        heads = shard.heads + shard.kv_heads
        yield LinearOperator("rotary", _build_rotary(device_spec, heads, size))
    yield LinearOperator("attention_out", _build_product(device_spec, shard.heads * size, hidden))
    yield from _build_mlp_operators(shard, device_spec)


def build_iteration_operators(shard: Shard, device_spec: DeviceSpec) -> Iterator[LinearOperator]:
    """Yield the operators that run once per iteration."""
    vocabulary, hidden = shard.shape.vocab_size, shard.shape.hidden_size
    yield LinearOperator("embedding", _build_embedding(device_spec, vocabulary, hidden))
    width = shard.get_mlp_width(vocabulary)
    yield LinearOperator("lm_head", _build_product(device_spec, hidden, width))


def _build_mlp_operators(shard: Shard, device_spec: DeviceSpec) -> Iterator[LinearOperator]:
    shape, experts = shard.shape, shard.shape.experts
    gated = shape.has_gated_mlp
    dense = shape.dense_mlp_layers / shape.num_layers
    if dense:
        yield from _build_dense(shard, device_spec, "mlp", shape.intermediate_size, dense)
    sparse = shape.expert_layers / shape.num_layers
    if experts is None or not sparse:
        return
    hidden, width = shape.hidden_size, shard.get_mlp_width(experts.intermediate_size)
    inner = width * (2 if gated else 1)
    routing = _EvenRouting(experts.count, experts.per_token)
    yield LinearOperator("router", _build_product(device_spec, hidden, experts.count), sparse)
    # Built within the yield: this frame must keep no reference to the weights of all experts.
    yield LinearOperator(
        "experts_up", _build_batched_product(device_spec, routing, hidden, inner), sparse
    )
    activate = _build_activation(device_spec, width, gated)
    yield LinearOperator(
        "experts_activation", lambda rows: activate(rows * routing.per_token), sparse
    )
    yield LinearOperator(
        "experts_down", _build_batched_product(device_spec, routing, width, hidden), sparse
    )
    if shared_width := experts.shared_intermediate_size:
        yield from _build_dense(shard, device_spec, "shared", shared_width, sparse)


def _build_dense(
    shard: Shard, device_spec: DeviceSpec, name: str, full_width: int, weight: float
) -> Iterator[LinearOperator]:
    hidden, width = shard.shape.hidden_size, shard.get_mlp_width(full_width)
    gated = shard.shape.has_gated_mlp
    inner = width * (2 if gated else 1)
    yield LinearOperator(f"{name}_up", _build_product(device_spec, hidden, inner), weight)
    yield LinearOperator(f"{name}_activation", _build_activation(device_spec, width, gated), weight)
    yield LinearOperator(f"{name}_down", _build_product(device_spec, width, hidden), weight)


@dataclass(frozen=True, slots=True)
class _EvenRouting:
    """Even routing of tokens to experts."""

    count: int
    per_token: int

    def compute_shape(self, tokens: int) -> tuple[int, int]:
        """Return (experts used, rows of each)."""
        unused_share = (1 - self.per_token / self.count) ** tokens
        used = max(self.per_token, round(self.count * (1 - unused_share)))
        return used, -(-tokens * self.per_token // used)


def _build_product(device_spec: DeviceSpec, inner: int, outer: int) -> BuildRun:
    weights = device_spec.make_copies(outer, inner)

    def make(rows: int) -> RunOperator:
        x = device_spec.make_tensor(rows, inner)
        return lambda index: functional.linear(x, weights[index % len(weights)])

    return make


def _build_batched_product(
    device_spec: DeviceSpec, spread: _EvenRouting, inner: int, outer: int
) -> BuildRun:
    # All experts together are larger than any cache.
    weights = device_spec.make_tensor(spread.count, inner, outer)

    def make(rows: int) -> RunOperator:
        num_used, rows_each = spread.compute_shape(rows)
        x, used = device_spec.make_tensor(num_used, rows_each, inner), weights[:num_used]
        return lambda _: torch.bmm(x, used)

    return make


def _build_norm(device_spec: DeviceSpec, hidden: int) -> BuildRun:
    gain = device_spec.make_tensor(hidden)

    def make(rows: int) -> RunOperator:
        x, residual = device_spec.make_tensor(rows, hidden), device_spec.make_tensor(rows, hidden)
        return lambda _: functional.rms_norm(x + residual, (hidden,), gain)

    return make


def _build_rotary(device_spec: DeviceSpec, heads: int, size: int) -> BuildRun:
    def make(rows: int) -> RunOperator:
        x = device_spec.make_tensor(rows, heads, size)
        cos, sin = (device_spec.make_tensor(rows, 1, size // 2) for _ in range(2))

        def run(_: int) -> torch.Tensor:
            first, second = x.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

        return run

    return make


def _build_activation(device_spec: DeviceSpec, width: int, gated: bool) -> BuildRun:
    def make(rows: int) -> RunOperator:
        x = device_spec.make_tensor(rows, width)
        if not gated:
            return lambda _: functional.relu(x)
        gate = device_spec.make_tensor(rows, width)
        return lambda _: functional.silu(gate) * x

    return make


def _build_embedding(device_spec: DeviceSpec, vocabulary: int, hidden: int) -> BuildRun:
    table = device_spec.make_tensor(vocabulary, hidden)

    def make(rows: int) -> RunOperator:
        ids = torch.randint(vocabulary, (rows,), device=device_spec.device)
        return lambda _: functional.embedding(ids, table)

    return make


@dataclass(frozen=True, slots=True)
class AttentionOperator:
    """Attention of one layer of a shard."""

    shard: Shard
    device_spec: DeviceSpec

    def build_prefill(self, tokens: int, cached_tokens: int) -> RunOperator:
        """Build the attention of a prompt chunk of `tokens` after `cached_tokens` computed ones."""
        shard, size = self.shard, self.shard.shape.head_size
        total = cached_tokens + tokens
        q = self.device_spec.make_tensor(1, shard.heads, tokens, size)
        k, v = (self.device_spec.make_tensor(1, shard.kv_heads, total, size) for _ in range(2))
        # Each row attends to the cached tokens and to those of the chunk up to itself.
        mask = causal_lower_right(tokens, total) if cached_tokens else None
        is_grouped = shard.heads != shard.kv_heads
        return lambda _: functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped
        )

    def build_decode(self, batch: int, context_tokens: int) -> RunOperator:
        """Build the attention of one token each of `batch` requests with `context_tokens` each."""
        shard, size = self.shard, self.shard.shape.head_size
        group = shard.heads // shard.kv_heads
        q = self.device_spec.make_tensor(batch * shard.kv_heads, group, size)
        k = self.device_spec.make_copies(batch * shard.kv_heads, context_tokens, size)
        v = self.device_spec.make_copies(batch * shard.kv_heads, context_tokens, size)

        def run(index: int) -> object:
            keys, values = k[index % len(k)], v[index % len(v)]
            return torch.softmax(q @ keys.transpose(1, 2) * size**-0.5, dim=-1) @ values

        return run
