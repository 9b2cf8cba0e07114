"""Token-level operators of a layer: matrix products, norms, activations (Vidur, section 4.3).

Their time depends only on the number of rows in an iteration. What is hard: experts. An iteration
of n tokens uses some of them, each with a few rows, and must read the weights of all it uses; they
run as one batched product over the experts that even routing uses.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from cleave_worker.profiler.clock import Run
from cleave_worker.profiler.shard import Shard

Make = Callable[[int], Run]
"""Builds an operator for a number of rows."""

_CACHE_BYTES = 256 << 20
"""Copies of weights fill at least this: several times the largest L2 cache."""
_MOST_COPIES = 64


@dataclass(frozen=True, slots=True)
class Linear:
    """One operator, and how often the average layer runs it."""

    name: str
    make: Make
    weight: float = 1.0
    """Runs per layer; below 1 where only some layers have it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Device and data type of the measured operators."""

    device: torch.device
    dtype: torch.dtype

    def empty(self, *sizes: int) -> torch.Tensor:
        """Return small random numbers: zeros would draw less power and so run faster."""
        return torch.randn(*sizes, device=self.device, dtype=self.dtype) * 0.02

    def copies(self, *sizes: int) -> torch.Tensor:
        """Return several tensors of these sizes, stacked along the first dimension."""
        num_bytes = math.prod(sizes) * self.dtype.itemsize
        num_copies = 1 if self.device.type == "cpu" else -(-_CACHE_BYTES // num_bytes)
        return self.empty(min(num_copies, _MOST_COPIES), *sizes)


def layer_operators(shard: Shard, device_spec: Place) -> Iterator[Linear]:
    """Yield the operators of one layer of the shard except attention.

    Lazy, so that only one of them occupies memory.
    """
    shape = shard.shape
    hidden, size = shape.hidden_size, shape.head_size
    qkv = (shard.heads + 2 * shard.kv_heads) * size
    yield Linear("norm", _norm(device_spec, hidden), 2)
    yield Linear("qkv", _product(device_spec, hidden, qkv))
    if not shape.learned_positions:
        yield Linear("rotary", _rotary(device_spec, shard.heads + shard.kv_heads, size))
    yield Linear("attention_out", _product(device_spec, shard.heads * size, hidden))
    yield from _mlp_operators(shard, device_spec)


def once_operators(shard: Shard, device_spec: Place) -> Iterator[Linear]:
    """Yield the operators that run once per iteration."""
    shape = shard.shape
    yield Linear("embedding", _embedding(device_spec, shape.vocab_size, shape.hidden_size))
    yield Linear(
        "lm_head", _product(device_spec, shape.hidden_size, shard.mlp_width(shape.vocab_size))
    )


def _mlp_operators(shard: Shard, device_spec: Place) -> Iterator[Linear]:
    shape, experts = shard.shape, shard.shape.experts
    dense = 1.0 if experts is None else experts.dense_layers / shape.num_layers
    if dense:
        yield from _dense(shard, device_spec, "mlp", shape.intermediate_size, dense)
    if experts is None or dense == 1.0:
        return
    sparse = 1 - dense
    hidden, width = shape.hidden_size, shard.mlp_width(experts.intermediate_size)
    inner = width * (2 if shape.has_gated_mlp else 1)
    routing = _Spread(experts.count, experts.per_token)
    yield Linear("router", _product(device_spec, hidden, experts.count), sparse)
    yield Linear("experts_up", _batched_product(device_spec, routing, hidden, inner), sparse)
    activation = _activation(device_spec, width, shape.has_gated_mlp)
    yield Linear("experts_activation", lambda rows: activation(rows * routing.per_token), sparse)
    yield Linear("experts_down", _batched_product(device_spec, routing, width, hidden), sparse)
    if experts.shared_intermediate_size:
        yield from _dense(shard, device_spec, "shared", experts.shared_intermediate_size, sparse)


def _dense(
    shard: Shard, device_spec: Place, name: str, full_width: int, weight: float
) -> Iterator[Linear]:
    hidden, width = shard.shape.hidden_size, shard.mlp_width(full_width)
    gated = shard.shape.has_gated_mlp
    yield Linear(f"{name}_up", _product(device_spec, hidden, width * (2 if gated else 1)), weight)
    yield Linear(f"{name}_activation", _activation(device_spec, width, gated), weight)
    yield Linear(f"{name}_down", _product(device_spec, width, hidden), weight)


@dataclass(frozen=True, slots=True)
class _Spread:
    """Even routing of tokens to experts."""

    count: int
    per_token: int

    def shape(self, tokens: int) -> tuple[int, int]:
        """Return (experts used, rows of each)."""
        unused_share = (1 - self.per_token / self.count) ** tokens
        used = max(self.per_token, round(self.count * (1 - unused_share)))
        return used, -(-tokens * self.per_token // used)


def _product(device_spec: Place, inner: int, outer: int) -> Make:
    weights = device_spec.copies(outer, inner)

    def make(rows: int) -> Run:
        x = device_spec.empty(rows, inner)
        return lambda index: functional.linear(x, weights[index % len(weights)])

    return make


def _batched_product(device_spec: Place, spread: _Spread, inner: int, outer: int) -> Make:
    # All experts together are larger than any cache.
    weights = device_spec.empty(spread.count, inner, outer)

    def make(rows: int) -> Run:
        num_used, rows_each = spread.shape(rows)
        x = device_spec.empty(num_used, rows_each, inner)
        used_weights = weights[:num_used]
        return lambda _: torch.bmm(x, used_weights)

    return make


def _norm(device_spec: Place, hidden: int) -> Make:
    gain = device_spec.empty(hidden)

    def make(rows: int) -> Run:
        x, residual = device_spec.empty(rows, hidden), device_spec.empty(rows, hidden)
        return lambda _: functional.rms_norm(x + residual, (hidden,), gain)

    return make


def _rotary(device_spec: Place, heads: int, size: int) -> Make:
    def make(rows: int) -> Run:
        x = device_spec.empty(rows, heads, size)
        cos, sin = device_spec.empty(rows, 1, size // 2), device_spec.empty(rows, 1, size // 2)

        def run(_: int) -> torch.Tensor:
            first, second = x.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

        return run

    return make


def _activation(device_spec: Place, width: int, gated: bool) -> Make:
    def make(rows: int) -> Run:
        x = device_spec.empty(rows, width)
        if not gated:
            return lambda _: functional.relu(x)
        gate = device_spec.empty(rows, width)
        return lambda _: functional.silu(gate) * x

    return make


def _embedding(device_spec: Place, vocabulary: int, hidden: int) -> Make:
    table = device_spec.empty(vocabulary, hidden)

    def make(rows: int) -> Run:
        ids = torch.randint(vocabulary, (rows,), device=device_spec.device)
        return lambda _: functional.embedding(ids, table)

    return make
