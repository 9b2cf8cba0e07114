"""Estimates which instances have cached the prefix of a prompt, in bounded memory.

Called by the router for the policy PrefixAware. What is hard: a gateway has text, engines cache
blocks of tokens and do not report evictions. So text is split into blocks with chained hashes, and
the index keeps the latest blocks of each instance, as many as its KV cache can hold. Hashing text
takes a few microseconds; tokenizing would cost more than all other work of the gateway.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from zlib import crc32

from cleave.policy.dispatch import NONE, Scores, find_least

BLOCK_BYTES = 512
"""Bytes of text per block."""
TOKENS_PER_BLOCK = 128
"""Approximate tokens per block: eight blocks of vLLM's KV cache."""
_MAX_BLOCKS = 256
"""Blocks per prompt; text beyond 128 KiB is hardly ever shared."""


def hash_blocks(text: bytes | memoryview, adapter: int = 0) -> list[int]:
    """Chained hashes: one for each full block of `text` together with all text before it.

    `adapter`: key of the adapter that computes the KV; 0: the base model. Hashes have 32 bits: a
    collision only leads to a suboptimal pick.
    """
    hashes: list[int] = []
    chained = adapter
    view = memoryview(text)
    for end in range(BLOCK_BYTES, min(len(view), _MAX_BLOCKS * BLOCK_BYTES) + 1, BLOCK_BYTES):
        chained = crc32(view[end - BLOCK_BYTES : end], chained)
        hashes.append(chained)
    return hashes


class PrefixIndex:
    """Which holders probably cache which blocks. A holder is the boot ID of an engine."""

    def __init__(self) -> None:
        self._holders: dict[int, set[str]] = {}
        self._recent: dict[str, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, holder: str, hashes: Sequence[int], most_blocks: int) -> None:
        """Record that a prompt was sent to `holder`, whose KV cache holds `most_blocks` blocks."""
        recent = self._recent.setdefault(holder, OrderedDict())
        # The first blocks are shared most, so they become the most recently used ones.
        for each in reversed(hashes):
            if each in recent:
                recent.move_to_end(each)
            else:
                recent[each] = None
                self._holders.setdefault(each, set()).add(holder)
        while len(recent) > max(most_blocks, 1):
            self._drop(recent.popitem(last=False)[0], holder)

    def retain(self, holders: Collection[str]) -> None:
        """Remove all other holders."""
        for gone in self._recent.keys() - set(holders):
            for each in self._recent.pop(gone):
                self._drop(each, gone)

    def contains(self, hashes: Sequence[int]) -> bool:
        """Whether any holder has the first block of the prompt."""
        return bool(hashes) and hashes[0] in self._holders

    def find(self, hashes: Sequence[int]) -> Iterator[tuple[int, set[str]]]:
        """(number of leading blocks, holders that have them), in descending order of blocks."""
        # A holder of a block has all blocks before it: later blocks of a prompt are evicted first.
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high + 1) // 2
            if hashes[middle - 1] in self._holders:
                low = middle
            else:
                high = middle - 1
        for count in range(low, 0, -1):
            yield count, self._holders.get(hashes[count - 1], set())

    def _drop(self, block: int, holder: str) -> None:
        holders = self._holders[block]
        holders.discard(holder)
        if not holders:
            del self._holders[block]


def find_least_uncached(
    scores: Scores,
    holder_at: Callable[[int], str],
    slots: Mapping[str, int],
    matches: Iterable[tuple[int, set[str]]],
) -> int:
    """Slot with the least score minus cached tokens; NONE when all are closed. `holder_at`,
    `slots`: holder by slot, and slot by holder; `matches`: from `PrefixIndex.find`."""
    best = least = find_least(scores)
    if least == NONE:
        return NONE
    shortest = lowest = float(scores[least])
    its_holder = holder_at(least)
    for count, holders in matches:
        tokens = count * TOKENS_PER_BLOCK
        if shortest - tokens >= lowest:
            break
        if its_holder in holders:
            # No other slot can be better. Common prefixes are cached nearly everywhere.
            return least
        for holder in holders:
            slot = slots.get(holder, NONE)
            if slot != NONE and scores[slot] - tokens < lowest:
                best, lowest = slot, float(scores[slot]) - tokens
    return best
