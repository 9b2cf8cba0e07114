"""Tracks how much of a prompt's KV is computed and which chunks a consumer still lacks. Pure.

The producer announces a `Progress`; the consumer compares it with what it has and requests the
chunks in between. A slow consumer misses announcements, yet each layer of each block must be
transferred exactly once, and only after it is final.
"""

from typing import NamedTuple

import msgspec


class Progress(msgspec.Struct, frozen=True):
    """Final: all of the first `blocks_done` blocks, `layers_done` layers up to `blocks_started`."""

    blocks_done: int
    blocks_started: int
    layers_done: int
    """Layers that the running step has finished, of blocks `blocks_done` to `blocks_started`."""

    def clip_blocks(self, first: int, end: int) -> "Progress":
        """Return the progress limited to the blocks from `first` up to but not including `end`."""
        return Progress(
            _clamp(self.blocks_done, first, end),
            _clamp(self.blocks_started, first, end),
            self.layers_done,
        )

    def clip_layers(self, first: int, count: int) -> "Progress":
        """Return the progress of `count` layers from `first` on, numbered from 0."""
        return Progress(
            self.blocks_done, self.blocks_started, _clamp(self.layers_done - first, 0, count)
        )


NO_PROGRESS = Progress(0, 0, 0)


class KvChunk(NamedTuple):
    """Consecutive layers of consecutive blocks of a prompt."""

    first_block: int
    num_blocks: int
    first_layer: int
    num_layers: int


def find_missing_chunks(previous: Progress, now: Progress, num_layers: int) -> list[KvChunk]:
    """Return what became final between two announcements, in the order of the prompt.

    `num_layers`: of a complete block. Raises ValueError when `now` cannot follow `previous`.
    """
    if (
        now.blocks_done < previous.blocks_done
        or previous.blocks_done < now.blocks_done < previous.blocks_started
    ):
        raise ValueError(f"{now} does not follow {previous}")
    is_partial = previous.blocks_started > previous.blocks_done and previous.layers_done > 0
    first_layer, end = (
        (previous.layers_done, previous.blocks_started) if is_partial else (0, previous.blocks_done)
    )
    if is_partial and now.blocks_done == previous.blocks_done:
        if now.blocks_started != previous.blocks_started or now.layers_done < previous.layers_done:
            raise ValueError(f"{now} does not follow {previous}")
        chunks = [
            KvChunk(
                previous.blocks_done,
                end - previous.blocks_done,
                first_layer,
                now.layers_done - first_layer,
            )
        ]
    else:
        # 1. The other layers of blocks that were started. 2. Blocks that were begun and finished
        # since. 3. The first layers of blocks that are started now.
        chunks = [
            KvChunk(
                previous.blocks_done,
                end - previous.blocks_done,
                first_layer,
                num_layers - first_layer,
            ),
            KvChunk(end, now.blocks_done - end, 0, num_layers),
            KvChunk(now.blocks_done, now.blocks_started - now.blocks_done, 0, now.layers_done),
        ]
    return [chunk for chunk in chunks if chunk.num_blocks and chunk.num_layers]


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
