"""Which instances have computed the beginning of a prompt before: a bounded guess for each.

Called by the router for the policy PrefixAware. What is hard: a gateway sees text, engines cache
blocks of tokens, and nobody tells when one is dropped; so text is cut into blocks whose hashes
chain, and for each instance the latest are kept, as many as its KV cache has room for. Hashing text
costs a few microseconds where tokenizing it would cost more than all else that the gateway does.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from zlib import crc32

from cleave.policy.dispatch import NONE, Scores, find_least

BLOCK_BYTES = 512
"""Of text."""
TOKENS_PER_BLOCK = 128
"""What that is, about: eight blocks of an engine's cache."""
_MOST_BLOCKS = 256
"""Of one prompt; what is longer than 128 KiB is as good as unique beyond it."""


def hash_blocks(text: bytes | memoryview, adapter: int = 0) -> list[int]:
    """A hash for each whole block of `text` and all that is before it, first one first.

    `adapter`: key of the one whose KV it is; 0: the model's own.
    32 bits: two texts that share one by accident cost a pick that is not the best, nothing else.
    """
    hashes: list[int] = []
    chained = adapter
    view = memoryview(text)
    for end in range(BLOCK_BYTES, min(len(view), _MOST_BLOCKS * BLOCK_BYTES) + 1, BLOCK_BYTES):
        chained = crc32(view[end - BLOCK_BYTES : end], chained)
        hashes.append(chained)
    return hashes


class PrefixIndex:
    """Who has probably cached which blocks. Holders are boots of engines: a restart forgets."""

    def __init__(self) -> None:
        self._holders: dict[int, set[str]] = {}
        self._recent: dict[str, OrderedDict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, holder: str, hashes: Sequence[int], most_blocks: int) -> None:
        """A prompt was sent there; `most_blocks`: how many its KV cache has room for."""
        recent = self._recent.setdefault(holder, OrderedDict())
        # The first blocks are shared most, so they are made the youngest.
        for each in reversed(hashes):
            if each in recent:
                recent.move_to_end(each)
            else:
                recent[each] = None
                self._holders.setdefault(each, set()).add(holder)
        while len(recent) > max(most_blocks, 1):
            self._drop(recent.popitem(last=False)[0], holder)

    def keep(self, holders: Collection[str]) -> None:
        """Forget all others."""
        for gone in self._recent.keys() - set(holders):
            for each in self._recent.pop(gone):
                self._drop(each, gone)

    def knows(self, hashes: Sequence[int]) -> bool:
        """Whether anybody has the beginning of such a prompt."""
        return bool(hashes) and hashes[0] in self._holders

    def find(self, hashes: Sequence[int]) -> Iterator[tuple[int, set[str]]]:
        """(blocks from the first on, who has them), the most blocks first."""
        # Hashes are chained and old blocks go last ones first: who has a block has those before.
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


def find_cached(
    scores: Scores,
    holder_at: Callable[[int], str],
    slots: Mapping[str, int],
    found: Iterable[tuple[int, set[str]]],
) -> int:
    """Slot of the least score less the tokens cached there; NONE when all are closed.

    `holder_at`, `slots`: the holder on a slot of the board, and the other way round; `found`: as
    `PrefixIndex.find` gives it.
    """
    best = least = find_least(scores)
    if least == NONE:
        return NONE
    shortest = lowest = float(scores[least])
    its_holder = holder_at(least)
    for count, holders in found:
        tokens = count * TOKENS_PER_BLOCK
        if shortest - tokens >= lowest:
            break
        if its_holder in holders:
            # Nobody can be better. What most prompts begin with is cached nearly everywhere.
            return least
        for holder in holders:
            slot = slots.get(holder, NONE)
            if slot != NONE and scores[slot] - tokens < lowest:
                best, lowest = slot, float(scores[slot]) - tokens
    return best
