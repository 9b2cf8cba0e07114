"""The content of a KV block, and the token that follows from it. Used by the scheduler's sequences.

The emulated KV of a token is a 32-bit hash of all tokens up to it (real keys and values depend on
the same). A block contains the hash of its last computed token, and the next token is a function of
every block that the sequence reads. So KV that is wrong, missing, swapped, truncated or stale gives
wrong tokens, and the same prompt gives the same tokens on every instance, with or without a
handoff. It runs once per token per stream, so it costs two integer operations and one CRC.
"""

import zlib
from array import array

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
