"""How much of a prompt's KV is computed, and which chunks a consumer still lacks. Pure.

The producer announces a `Progress`; the consumer compares it with what it has and requests the
chunks in between. What is hard: a slow consumer misses announcements, yet each layer of each block
must be transferred exactly once, and only after it is final.
"""

from typing import NamedTuple

import msgspec


class Progress(msgspec.Struct, frozen=True):
    """Final: all of the first `blocks` blocks, `planes` layers of those up to `coming`."""

    blocks: int
    coming: int
    planes: int
    """Layers that the running step has finished, of the blocks from `blocks` to `coming`."""

    def within(self, first: int, end: int) -> "Progress":
        """Return the progress limited to the blocks from `first` up to but not including `end`."""
        return Progress(
            _clamp(self.blocks, first, end), _clamp(self.coming, first, end), self.planes
        )

    def of_planes(self, first: int, count: int) -> "Progress":
        """Return the progress of `count` layers from `first` on, numbered from 0."""
        return Progress(self.blocks, self.coming, _clamp(self.planes - first, 0, count))


NOTHING = Progress(0, 0, 0)


class Piece(NamedTuple):
    """Consecutive layers of consecutive blocks of a prompt."""

    first_block: int
    num_blocks: int
    first_plane: int
    num_planes: int


def missing(previous: Progress, now: Progress, num_layers: int) -> list[Piece]:
    """Return what became final between two announcements, in the order of the prompt.

    `num_layers`: of a complete block. Raises ValueError when `now` cannot follow `previous`.
    """
    if now.blocks < previous.blocks or previous.blocks < now.blocks < previous.coming:
        raise ValueError(f"{now} does not follow {previous}")
    is_partial = previous.coming > previous.blocks and previous.planes > 0
    first_layer, end = (previous.planes, previous.coming) if is_partial else (0, previous.blocks)
    if is_partial and now.blocks == previous.blocks:
        if now.coming != previous.coming or now.planes < previous.planes:
            raise ValueError(f"{now} does not follow {previous}")
        chunks = [
            Piece(previous.blocks, end - previous.blocks, first_layer, now.planes - first_layer)
        ]
    else:
        # 1. The other layers of blocks that were started. 2. Blocks that were begun and finished
        # since. 3. The first layers of blocks that are started now.
        chunks = [
            Piece(previous.blocks, end - previous.blocks, first_layer, num_layers - first_layer),
            Piece(end, now.blocks - end, 0, num_layers),
            Piece(now.blocks, now.coming - now.blocks, 0, now.planes),
        ]
    return [chunk for chunk in chunks if chunk.num_blocks and chunk.num_planes]


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
