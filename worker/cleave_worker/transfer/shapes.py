"""How an engine spreads KV over its ranks, and which rank takes what from which of another engine.

Both ends of a hand-off call this and come to the same bytes. Tensor ranks share a layer's KV heads
out in order; more ranks than heads hold copies, so that KV of MLA, which counts as one head, lies
whole on each. Pipeline stages hold layers in order. What is hard: an owner must know how many ranks
will come before it gives blocks up, and ranks whose copies nobody needs must hear of the end too.
"""

import functools
import itertools
from collections.abc import Sequence

import msgspec

from cleave_worker.transfer.memory import Plane

_BEYOND = 1 << 20
"""End of the last stage: what is added to a model's layers, to draft with, lies there."""


class Shape(msgspec.Struct, frozen=True):
    """An engine's parallelism. Ranks are counted stage by stage."""

    tensor_parallel_size: int = 1
    stages: tuple[int, ...] = (0,)
    """First layer of each pipeline stage."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the engine."""
        return self.tensor_parallel_size * len(self.stages)

    def layers(self, rank: int) -> range:
        """Those of the rank's stage; the last one's are open at the end."""
        stage = rank // self.tensor_parallel_size
        return range(self.stages[stage], (*self.stages[1:], _BEYOND)[stage])

    def heads(self, rank: int, num_kv_heads: int) -> range:
        """KV heads that a rank holds, as vLLM shares them out."""
        first = rank % self.tensor_parallel_size * num_kv_heads // self.tensor_parallel_size
        return range(first, first + max(1, num_kv_heads // self.tensor_parallel_size))

    def fault(self, num_kv_heads: int) -> str:
        """Why the KV cannot be spread so; empty: it can."""
        size, stages = self.tensor_parallel_size, self.stages
        if num_kv_heads < 1 or size < 1 or (num_kv_heads % size and size % num_kv_heads):
            return f"{num_kv_heads} KV heads cannot be shared out to {size} tensor ranks"
        if not stages or stages[0] != 0 or list(stages) != sorted(set(stages)):
            return f"stages begin at layers {stages}: they must ascend from 0"
        return ""


class Share(msgspec.Struct, frozen=True):
    """What one rank holds."""

    shape: Shape = Shape()
    rank: int = 0
    layers: tuple[int, ...] = ()
    """Of its planes, in their order; empty: the stage's, one after the other."""

    def layers_of(self, num_planes: int) -> Sequence[int]:
        """Layer of each plane. Raises ValueError when they are not what the rank should hold."""
        own = self.shape.layers(self.rank)
        layers = self.layers or own[:num_planes]
        if len(layers) != num_planes or any(layer not in own for layer in layers):
            raise ValueError(
                f"rank {self.rank} of {self.shape} cannot hold layers {tuple(layers)} in "
                f"{num_planes} planes"
            )
        return layers


class Part(msgspec.Struct, frozen=True):
    """Of every block: these heads of these layers, counted over the whole model."""

    first_layer: int
    end_layer: int
    first_head: int
    end_head: int


class Source(msgspec.Struct, frozen=True):
    """A rank of the other engine that one reading rank has to do with."""

    rank: int
    part: Part | None
    """None: it holds copies that nobody needs, and is only told that they are not wanted."""
    num_readers: int
    """Ranks that turn to it in all."""


@functools.lru_cache(256)
def sources(ours: Shape, rank: int, theirs: Shape, num_kv_heads: int) -> tuple[Source, ...]:
    """Whom rank `rank` of ours turns to; together the parts are all that it holds, each once.

    Every rank of theirs is turned to by at least one of ours. Both shapes must be free of faults.
    """
    readings = _readings(ours, theirs, num_kv_heads)
    turning = [there for _, there in readings]
    return tuple(
        Source(there, part, turning.count(there))
        for (here, there), part in readings.items()
        if here == rank
    )


def _readings(ours: Shape, theirs: Shape, num_kv_heads: int) -> dict[tuple[int, int], Part | None]:
    """By rank of ours and rank of theirs, for all of them."""
    found: dict[tuple[int, int], Part | None] = {}
    for here, there in itertools.product(range(ours.num_ranks), range(theirs.num_ranks)):
        layers = _common(ours.layers(here), theirs.layers(there))
        heads = _common(ours.heads(here, num_kv_heads), theirs.heads(there, num_kv_heads))
        if layers and heads and _serves(here, there, ours, theirs, num_kv_heads):
            found[here, there] = Part(layers.start, layers.stop, heads.start, heads.stop)
    read = {there for _, there in found}
    for there in set(range(theirs.num_ranks)) - read:
        here = next(
            here
            for here in range(ours.num_ranks)
            if _common(ours.layers(here), theirs.layers(there))
            and (there - here) % min(ours.tensor_parallel_size, theirs.tensor_parallel_size) == 0
        )
        found[here, there] = None
    return found


def _serves(here: int, there: int, ours: Shape, theirs: Shape, num_kv_heads: int) -> bool:
    """Of ranks that hold copies of a head one serves; readers are spread over them."""
    num_copies = max(1, theirs.tensor_parallel_size // num_kv_heads)
    copy = there % theirs.tensor_parallel_size % num_copies
    return copy == here % ours.tensor_parallel_size % num_copies


def cut(planes: Sequence[Plane], share: Share, part: Part, num_kv_heads: int) -> tuple[Plane, ...]:
    """Where a part lies among a rank's planes, whose blocks hold head after head.

    Raises ValueError when the rank does not hold it.
    """
    layers = range(part.first_layer, part.end_layer)
    heads = share.shape.heads(share.rank, num_kv_heads)
    wanted = range(part.first_head, part.end_head)
    if not wanted or _common(heads, wanted) != wanted:
        raise ValueError(f"rank {share.rank} holds heads {heads}, not {wanted}")
    cuts = tuple(
        plane.part(wanted.start - heads.start, len(wanted), len(heads))
        for plane, layer in zip(planes, share.layers_of(len(planes)), strict=True)
        if layer in layers
    )
    if not cuts:
        raise ValueError(f"rank {share.rank} holds none of layers {layers}")
    return cuts


def count_before(num_planes: int, share: Share, part: Part) -> int:
    """Planes of a rank that lie before those of a part."""
    return sum(layer < part.first_layer for layer in share.layers_of(num_planes))


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))
