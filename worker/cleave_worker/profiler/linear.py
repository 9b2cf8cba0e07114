"""Token-level operators of a layer: matrix products, norms, activations (Vidur, section 4.3).

Their time depends on the rows of a pass alone. What is hard: experts. A pass of n tokens touches
some of them, each with a few rows, and has to read the weights of all it touches; they run as one
batched product over the experts touched with even routing.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from cleave_worker.profiler.clock import Run
from cleave_worker.profiler.shard import Shard

Make = Callable[[int], Run]
"""The operator for a number of rows."""

_CACHE_BYTES = 256 << 20
"""Copies of weights fill at least this: several times the largest L2 cache."""
_MOST_COPIES = 64


@dataclass(frozen=True, slots=True)
class Linear:
    """One operator and how much of the average layer it is."""

    name: str
    make: Make
    weight: float = 1.0
    """Uses in one layer; below 1 where only some layers have it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where and with what numbers operators run."""

    device: torch.device
    dtype: torch.dtype

    def empty(self, *sizes: int) -> torch.Tensor:
        """Small random numbers: zeros would draw less power and so run faster."""
        return torch.randn(*sizes, device=self.device, dtype=self.dtype) * 0.02

    def copies(self, *sizes: int) -> torch.Tensor:
        """Several tensors of these sizes, as the first dimension of one."""
        num_bytes = math.prod(sizes) * self.dtype.itemsize
        wanted = 1 if self.device.type == "cpu" else -(-_CACHE_BYTES // num_bytes)
        return self.empty(min(wanted, _MOST_COPIES), *sizes)


def layer_operators(shard: Shard, place: Place) -> Iterator[Linear]:
    """Operators of one layer of the shard but for attention itself; made one by one, so that only
    one holds memory."""
    shape = shard.shape
    hidden, size = shape.hidden_size, shape.head_size
    qkv = (shard.heads + 2 * shard.kv_heads) * size
    yield Linear("norm", _norm(place, hidden), 2)
    yield Linear("qkv", _product(place, hidden, qkv))
    if not shape.learned_positions:
        yield Linear("rotary", _rotary(place, shard.heads + shard.kv_heads, size))
    yield Linear("attention_out", _product(place, shard.heads * size, hidden))
    yield from _mlp_operators(shard, place)


def once_operators(shard: Shard, place: Place) -> Iterator[Linear]:
    """Operators that run once a pass."""
    shape = shard.shape
    yield Linear("embedding", _embedding(place, shape.vocab_size, shape.hidden_size))
    yield Linear("lm_head", _product(place, shape.hidden_size, shard.mlp_width(shape.vocab_size)))


def _mlp_operators(shard: Shard, place: Place) -> Iterator[Linear]:
    shape, experts = shard.shape, shard.shape.experts
    dense = 1.0 if experts is None else experts.dense_layers / shape.num_layers
    if dense:
        yield from _dense(shard, place, "mlp", shape.intermediate_size, dense)
    if experts is None or dense == 1.0:
        return
    sparse = 1 - dense
    hidden, width = shape.hidden_size, shard.mlp_width(experts.intermediate_size)
    inner = width * (2 if shape.has_gated_mlp else 1)
    spread = _Spread(experts.count, experts.per_token)
    yield Linear("router", _product(place, hidden, experts.count), sparse)
    yield Linear("experts_up", _batched_product(place, spread, hidden, inner), sparse)
    activation = _activation(place, width, shape.has_gated_mlp)
    yield Linear("experts_activation", lambda rows: activation(rows * spread.per_token), sparse)
    yield Linear("experts_down", _batched_product(place, spread, width, hidden), sparse)
    if experts.shared_intermediate_size:
        yield from _dense(shard, place, "shared", experts.shared_intermediate_size, sparse)


def _dense(
    shard: Shard, place: Place, name: str, full_width: int, weight: float
) -> Iterator[Linear]:
    hidden, width = shard.shape.hidden_size, shard.mlp_width(full_width)
    gated = shard.shape.has_gated_mlp
    yield Linear(f"{name}_up", _product(place, hidden, width * (2 if gated else 1)), weight)
    yield Linear(f"{name}_activation", _activation(place, width, gated), weight)
    yield Linear(f"{name}_down", _product(place, width, hidden), weight)


@dataclass(frozen=True, slots=True)
class _Spread:
    """Even routing."""

    count: int
    per_token: int

    def shape(self, tokens: int) -> tuple[int, int]:
        """(experts touched, rows of each)."""
        untouched = (1 - self.per_token / self.count) ** tokens
        touched = max(self.per_token, round(self.count * (1 - untouched)))
        return touched, -(-tokens * self.per_token // touched)


def _product(place: Place, inner: int, outer: int) -> Make:
    weights = place.copies(outer, inner)

    def make(rows: int) -> Run:
        x = place.empty(rows, inner)
        return lambda index: functional.linear(x, weights[index % len(weights)])

    return make


def _batched_product(place: Place, spread: _Spread, inner: int, outer: int) -> Make:
    # All experts together are larger than any cache.
    weights = place.empty(spread.count, inner, outer)

    def make(rows: int) -> Run:
        touched, each = spread.shape(rows)
        x = place.empty(touched, each, inner)
        used = weights[:touched]
        return lambda _: torch.bmm(x, used)

    return make


def _norm(place: Place, hidden: int) -> Make:
    gain = place.empty(hidden)

    def make(rows: int) -> Run:
        x, residual = place.empty(rows, hidden), place.empty(rows, hidden)
        return lambda _: functional.rms_norm(x + residual, (hidden,), gain)

    return make


def _rotary(place: Place, heads: int, size: int) -> Make:
    def make(rows: int) -> Run:
        x = place.empty(rows, heads, size)
        cos, sin = place.empty(rows, 1, size // 2), place.empty(rows, 1, size // 2)

        def run(_: int) -> torch.Tensor:
            first, second = x.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

        return run

    return make


def _activation(place: Place, width: int, gated: bool) -> Make:
    def make(rows: int) -> Run:
        x = place.empty(rows, width)
        if not gated:
            return lambda _: functional.relu(x)
        gate = place.empty(rows, width)
        return lambda _: functional.silu(gate) * x

    return make


def _embedding(place: Place, vocabulary: int, hidden: int) -> Make:
    table = place.empty(vocabulary, hidden)

    def make(rows: int) -> Run:
        ids = torch.randint(vocabulary, (rows,), device=place.device)
        return lambda _: functional.embedding(ids, table)

    return make
