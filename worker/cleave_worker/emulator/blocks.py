"""Paged KV memory: free blocks, contents of blocks, and the prefix cache.

Owned by the scheduler. Free blocks keep their contents, and those of the prefix cache are reused
last, oldest first, so a freed prefix stays usable until its memory is needed, as in vLLM. Several
sequences may share a block through the prefix cache, so blocks are reference-counted. A cached
block is found by its tokens but contains what was really written to it (a wrong handoff poisons the
cache).

The emulated KV of a token is a 32-bit hash of all tokens up to it (real keys and values depend on
the same). A block contains the hash of its last computed token, and the next token is a function of
every block that the sequence reads. So KV that is wrong, missing, swapped, truncated or stale gives
wrong tokens, and the same prompt gives the same tokens on every instance, with or without a
handoff. It runs once per token per stream, so it costs two integer operations and one CRC.
"""

import zlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from cleave_worker.scheduling.block_uses import BlockUses

EMPTY = 0
"""Content of a block to which nothing was written."""

_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15


def extend(content: int, tokens: "array[int]") -> int:
    """Return the content after `tokens` follow `content`; any split gives the same."""
    return zlib.crc32(tokens, content)


def fold(summary: int, content: int) -> int:
    """Add one block to the summary of the blocks before it; the order matters."""
    mixed = ((summary ^ content) * _MULTIPLIER + 1) & _MASK
    return mixed ^ (mixed >> 29)


class BlockPool:
    """A fixed number of KV blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.uses = BlockUses()
        self.contents = [EMPTY] * num_blocks
        self.previous_contents = [EMPTY] * num_blocks
        """Content of each block before its present sequence; a stale transfer delivers this."""
        self._ref_counts = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that no sequence uses."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks; the caller has checked `num_free`."""
        return [self._allocate_one() for _ in range(count)]

    def acquire_cached(self, keys: Sequence[bytes]) -> list[int]:
        """Acquire the longest cached run of blocks for a prompt's block keys."""
        cached = [self._cached[key] for key in keys[: self.count_cached(keys)]]
        for block in cached:
            self._free.pop(block, None)
            self._ref_counts[block] += 1
            self.uses.begin(block)
        return cached

    def count_cached(self, keys: Sequence[bytes]) -> int:
        """The length of that run."""
        return next((at for at, key in enumerate(keys) if key not in self._cached), len(keys))

    def count_shared(self, keys: Sequence[bytes]) -> int:
        """How many blocks of that run a sequence holds."""
        run = keys[: self.count_cached(keys)]
        return sum(self._ref_counts[self._cached[key]] > 0 for key in run)

    def publish(self, block: int, key: bytes) -> None:
        """Enter a full block into the prefix cache."""
        if self._keys[block] is None and key not in self._cached:
            self._keys[block] = key
            self._cached[key] = block

    def free(self, blocks: Sequence[int]) -> None:
        """Free blocks; the last ones of a sequence are reused first, and before all others those
        that are not in the prefix cache."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                self._free[block] = None
                self._free.move_to_end(block, last=self._keys[block] is not None)

    def _allocate_one(self) -> int:
        block, _ = self._free.popitem(last=False)
        key = self._keys[block]
        if key is not None:
            del self._cached[key]
            self._keys[block] = None
        self.uses.begin(block)
        self._ref_counts[block] = 1
        self.previous_contents[block] = self.contents[block]
        self.contents[block] = EMPTY
        return block
