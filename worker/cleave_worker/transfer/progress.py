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

    def clip(self, blocks: range, first_layer: int, num_layers: int) -> "Progress":
        """Return the progress of these blocks in layers from `first_layer` on, counted from 0."""
        return Progress(
            _clamp(self.blocks_done, blocks.start, blocks.stop),
            _clamp(self.blocks_started, blocks.start, blocks.stop),
            _clamp(self.layers_done - first_layer, 0, num_layers),
        )


NO_PROGRESS = Progress(0, 0, 0)


class KvChunk(NamedTuple):
    """Consecutive layers of consecutive blocks of a prompt."""

    first_block: int
    num_blocks: int
    first_layer: int
    num_layers: int


def find_missing_chunks(previous: Progress, now: Progress, num_layers: int) -> list[KvChunk]:
    """Return what became final between two announcements, in the order of the prompt. `num_layers`:
    of a complete block. Raises ValueError when `now` cannot follow `previous`."""
    first, started = previous.blocks_done, previous.blocks_started
    if now.blocks_done < first or first < now.blocks_done < started:
        raise ValueError(f"{now} does not follow {previous}")
    is_partial = started > first and previous.layers_done > 0
    first_layer, end = (previous.layers_done, started) if is_partial else (0, first)
    if is_partial and now.blocks_done == first:
        if now.blocks_started != started or now.layers_done < first_layer:
            raise ValueError(f"{now} does not follow {previous}")
        chunks = [KvChunk(first, end - first, first_layer, now.layers_done - first_layer)]
    else:
        # 1. The other layers of blocks that were started. 2. Blocks that were begun and finished
        # since. 3. The first layers of blocks that are started now.
        chunks = [
            KvChunk(first, end - first, first_layer, num_layers - first_layer),
            KvChunk(end, now.blocks_done - end, 0, num_layers),
            KvChunk(now.blocks_done, now.blocks_started - now.blocks_done, 0, now.layers_done),
        ]
    return [chunk for chunk in chunks if chunk.num_blocks and chunk.num_layers]


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
