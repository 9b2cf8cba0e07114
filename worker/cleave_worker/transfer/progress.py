"""How far a prompt's KV has come while it is computed, and what of it is still to be moved. Pure.

The owner announces a `Progress`; the reader compares it with what it has and asks for the pieces
between. What is hard: announcements are skipped when the reader is slow, yet each plane of each
block must be moved once, and none before it is final.
"""

from typing import NamedTuple

import msgspec


class Progress(msgspec.Struct, frozen=True):
    """What is final: of the first `blocks` everything, of those up to `coming` the first planes."""

    blocks: int
    coming: int
    planes: int
    """Of the blocks between: one for each layer that the running step is through with."""

    def within(self, first: int, end: int) -> "Progress":
        """The same for whoever wants the blocks from `first` to before `end` only."""
        return Progress(
            _clamp(self.blocks, first, end), _clamp(self.coming, first, end), self.planes
        )

    def of_planes(self, first: int, count: int) -> "Progress":
        """The same for whoever wants so many planes of a block only, and counts them from 0."""
        return Progress(self.blocks, self.coming, _clamp(self.planes - first, 0, count))


NOTHING = Progress(0, 0, 0)


class Piece(NamedTuple):
    """Some planes of some blocks that follow each other in the prompt."""

    first_block: int
    num_blocks: int
    first_plane: int
    num_planes: int


def missing(have: Progress, now: Progress, num_planes: int) -> list[Piece]:
    """What became final between two announcements, in the order of the prompt.

    `num_planes`: of a whole block. Raises ValueError for announcements that no prefill makes.
    """
    if now.blocks < have.blocks or have.blocks < now.blocks < have.coming:
        raise ValueError(f"{now} does not follow {have}")
    started = have.coming > have.blocks and have.planes > 0
    from_plane, at = (have.planes, have.coming) if started else (0, have.blocks)
    if started and now.blocks == have.blocks:
        if now.coming != have.coming or now.planes < have.planes:
            raise ValueError(f"{now} does not follow {have}")
        pieces = [Piece(have.blocks, at - have.blocks, from_plane, now.planes - from_plane)]
    else:
        pieces = [
            Piece(have.blocks, at - have.blocks, from_plane, num_planes - from_plane),
            Piece(at, now.blocks - at, 0, num_planes),
            Piece(now.blocks, now.coming - now.blocks, 0, now.planes),
        ]
    return [piece for piece in pieces if piece.num_blocks and piece.num_planes]


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
