"""How an engine shards KV over its ranks, and which parts each consumer rank pulls from which rank.

Both ends call this and arrive at the same bytes. Tensor parallel ranks share a layer's KV heads in
order; with more ranks than heads several ranks have copies, so with MLA, which counts as one head,
each rank has the whole KV. Pipeline stages hold layers in order. A producer rank must know how many
consumer ranks will come before it frees blocks, and a rank whose copy is not needed must be
notified of the end of the pull, too.
"""

import functools
import itertools
from collections.abc import Sequence

import msgspec

from cleave_worker.transfer.memory import LayerRegion

_LAST_STAGE_END = 1 << 20
"""End of the last stage: additional layers of a model, such as draft layers, belong to it."""


class ParallelShape(msgspec.Struct, frozen=True):
    """Parallelism of an engine. Ranks are numbered stage by stage."""

    tensor_parallel_size: int = 1
    stages: tuple[int, ...] = (0,)
    """First layer of each pipeline stage."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the engine."""
        return self.tensor_parallel_size * len(self.stages)

    def get_layer_range(self, rank: int) -> range:
        """Return the layers of the rank's stage; the range of the last stage is open-ended."""
        stage = rank // self.tensor_parallel_size
        return range(self.stages[stage], (*self.stages[1:], _LAST_STAGE_END)[stage])

    def get_head_range(self, rank: int, num_kv_heads: int) -> range:
        """Return the KV heads that a rank has, as vLLM distributes them."""
        first = rank % self.tensor_parallel_size * num_kv_heads // self.tensor_parallel_size
        return range(first, first + max(1, num_kv_heads // self.tensor_parallel_size))

    def find_fault(self, num_kv_heads: int) -> str:
        """Return why KV cannot be sharded so; empty when it can."""
        size, stages = self.tensor_parallel_size, self.stages
        if num_kv_heads < 1 or size < 1 or (num_kv_heads % size and size % num_kv_heads):
            return f"{num_kv_heads} KV heads cannot be sharded over {size} tensor parallel ranks"
        if not stages or stages[0] != 0 or list(stages) != sorted(set(stages)):
            return f"stages start at layers {stages}: they must ascend from 0"
        return ""


class ShardSpec(msgspec.Struct, frozen=True):
    """The part of the model's KV that one rank has."""

    shape: ParallelShape = ParallelShape()
    rank: int = 0
    layer_indices: tuple[int, ...] = ()
    """Model layer of each local layer, in order; empty: those of the stage, consecutively."""

    def get_layer_indices(self, num_layers: int) -> Sequence[int]:
        """Return the model layer of each local layer. Raises ValueError for impossible ones."""
        own = self.shape.get_layer_range(self.rank)
        layers = self.layer_indices or own[:num_layers]
        if len(layers) != num_layers or any(layer not in own for layer in layers):
            raise ValueError(
                f"rank {self.rank} of {self.shape} cannot have layers {tuple(layers)} in "
                f"{num_layers} layer regions"
            )
        return layers

    def count_layers_before(self, first_layer: int, num_layers: int) -> int:
        """Count the local layers that precede a layer of the model."""
        return sum(layer < first_layer for layer in self.get_layer_indices(num_layers))


class ShardPart(msgspec.Struct, frozen=True):
    """Heads and layers of every block, numbered over the whole model."""

    first_layer: int
    end_layer: int
    first_head: int
    end_head: int


class ShardSource(msgspec.Struct, frozen=True):
    """A rank of the producer that one consumer rank contacts."""

    rank: int
    part: ShardPart | None
    """None: the rank has an unneeded copy, and is only notified that it will not be read."""
    num_consumers: int
    """Number of consumer ranks that contact this rank."""


@functools.lru_cache(256)
def find_sources(
    local: ParallelShape, rank: int, remote: ParallelShape, num_kv_heads: int
) -> tuple[ShardSource, ...]:
    """Return the producer ranks that consumer rank `rank` contacts.

    Their parts together are all KV of `rank`, each part once. Every producer rank is contacted by
    at least one consumer rank. Both shapes must be valid, see `ParallelShape.find_fault`.
    """
    parts = _assign_parts(local, remote, num_kv_heads)
    contacted = [remote_rank for _, remote_rank in parts]
    return tuple(
        ShardSource(remote_rank, part, contacted.count(remote_rank))
        for (local_rank, remote_rank), part in parts.items()
        if local_rank == rank
    )


def _assign_parts(
    local: ParallelShape, remote: ParallelShape, num_kv_heads: int
) -> dict[tuple[int, int], ShardPart | None]:
    """Assign parts to (consumer rank, producer rank) pairs, for all ranks."""
    parts: dict[tuple[int, int], ShardPart | None] = {}
    local_size, remote_size = local.tensor_parallel_size, remote.tensor_parallel_size
    num_copies = max(1, remote_size // num_kv_heads)
    shared_layers = {
        (own, other): _intersect(local.get_layer_range(own), remote.get_layer_range(other))
        for own, other in itertools.product(range(local.num_ranks), range(remote.num_ranks))
    }
    for (own, other), layers in shared_layers.items():
        own_heads = local.get_head_range(own, num_kv_heads)
        heads = _intersect(own_heads, remote.get_head_range(other, num_kv_heads))
        # Consumer ranks are spread over the copies of the same heads.
        is_serving_copy = other % remote_size % num_copies == own % local_size % num_copies
        if layers and heads and is_serving_copy:
            parts[own, other] = ShardPart(layers.start, layers.stop, heads.start, heads.stop)
    for other in set(range(remote.num_ranks)) - {other for _, other in parts}:
        notifier = next(
            own
            for own in range(local.num_ranks)
            if shared_layers[own, other] and (other - own) % min(local_size, remote_size) == 0
        )
        parts[notifier, other] = None
    return parts


def slice_layers(
    all_layers: Sequence[LayerRegion], shard: ShardSpec, part: ShardPart, num_kv_heads: int
) -> tuple[LayerRegion, ...]:
    """Return where a part lies among a rank's layers, whose blocks contain head after head. Raises
    ValueError when the rank does not have it."""
    layers = range(part.first_layer, part.end_layer)
    heads = shard.shape.get_head_range(shard.rank, num_kv_heads)
    requested = range(part.first_head, part.end_head)
    if not requested or _intersect(heads, requested) != requested:
        raise ValueError(f"rank {shard.rank} has heads {heads}, not {requested}")
    indices = shard.get_layer_indices(len(all_layers))
    regions = tuple(
        region.get_part(requested.start - heads.start, len(requested), len(heads))
        for region, layer in zip(all_layers, indices, strict=True)
        if layer in layers
    )
    if not regions:
        raise ValueError(f"rank {shard.rank} has none of layers {layers}")
    return regions


def _intersect(first: range, second: range) -> range:
    return range(max(first.start, second.start), min(first.stop, second.stop))
