"""After how long prompts are used again: what prefix caches of any size would find. Called by the
router for each prompt that it sends.

A sample of the blocks is remembered, as in SHARDS (Waldspurger et al., FAST 2015, section 3): a
block is in the sample at each of its uses or at none. The time since a use is recorded, not the
distance in other blocks: it does not depend on the rate or on how many gateways there are, and
`traffic.reuse_curve` computes the hit share of each cache size from it. Memory is constant; where
it is short, what was used longest ago counts as new.

What is hard: a system prompt is used by all requests, so if its few blocks were sampled by hash, as
SHARDS does, they would stand for too much or too little as long as the gateway runs. But a prompt's
beginning was used whenever its continuation was, so times never fall along a prompt: a block stands
for all that lies between it and the sampled one before. So the sample is one of positions, and the
last block of a prompt and of its known part are always in it.
"""

from collections.abc import Sequence
from mmap import mmap

from cleave.policy.prefix_cache import BLOCK_ENDS, estimate_cached_tokens

BOUNDS_S = tuple(2.0**step for step in range(-1, 14))
"""Half a second to two hours."""
LAST_USES_BYTES = 1 << 20
"""131,072 blocks, two to five of a prompt."""
_DENSE_BLOCKS, _DENSE_STEP, _STEP = 8, 2, 8
"""One of two blocks is in the sample where system prompts end, then one of eight: each doubling of
the position."""
_TICKS_PER_S = 8
_TIME_BITS = 28
_TIME_MASK = (1 << _TIME_BITS) - 1
"""A cell: the 32 bits of a block above when it was used, in ticks, which wrap around in a year."""
_UNUSED = -1


class ReuseTimes:
    """Prompt tokens of one model by the time since they were used before."""

    __slots__ = ("_tokens",)

    def __init__(self) -> None:
        self._tokens = [0.0] * (len(BOUNDS_S) + 1)
        """By bound, and at the end those of new prompts."""

    def add(self, tokens: float, ticks: int) -> None:
        """Count tokens that were used so many ticks ago."""
        # The bounds are powers of two, from 4 ticks on.
        number = (ticks - 1).bit_length() - 2 if ticks > 4 else 0
        self._tokens[min(number, len(BOUNDS_S))] += tokens

    def add_new(self, tokens: float) -> None:
        """Count tokens that are not known."""
        self._tokens[-1] += tokens

    def to_list(self) -> list[float]:
        """The tokens; the form that `merge` takes."""
        return self._tokens

    def merge(self, other: Sequence[float]) -> None:
        """Add those of another process."""
        # In place: `to_list` of this object is the one that is counted in.
        self._tokens[:] = [a + b for a, b in zip(self._tokens, other, strict=True)]


class LastUses:
    """When the sampled blocks were used last, in memory that the processes of a gateway share. As
    in `PrefixIndex` there is no lock, and a lost cell counts as new."""

    __slots__ = ("_cell_mask", "_cells")

    def __init__(self, memory: mmap) -> None:
        """`memory`: LAST_USES_BYTES, zeros at first."""
        self._cells: memoryview[int] = memoryview(memory).cast("q")
        self._cell_mask = len(self._cells) - 1

    def record(
        self,
        blocks: list[int],
        known: int,
        text_bytes: int,
        prompt_tokens: int,
        now_s: float,
        times: ReuseTimes,
    ) -> None:
        """Count a prompt in `times` by the last uses of its blocks, of which the first `known` are
        those of an earlier one, and note this use."""
        now, last = int(now_s * _TICKS_PER_S) & _TIME_MASK, len(blocks) - 1
        counted, reached, age, at = 0.0, 0.0, _UNUSED, 0
        while at <= last:
            used = self._exchange(blocks[at], now)
            if at < known:
                # A block of an earlier prompt that is not in its sample: as the one before it.
                if used != _UNUSED and (now - used) & _TIME_MASK != age:
                    if age != _UNUSED:
                        times.add(reached - counted, age)
                        counted = reached
                    age = (now - used) & _TIME_MASK
                reached = float(prompt_tokens * BLOCK_ENDS[at]) / text_bytes
            following = _find_following(at)
            if at < known - 1 < following:
                at = known - 1
            elif at < last < following:
                at = last
            else:
                at = following
        if age != _UNUSED:
            known_tokens = estimate_cached_tokens(known, text_bytes, prompt_tokens)
            times.add(known_tokens - counted, age)
            counted = known_tokens
        times.add_new(prompt_tokens - counted)

    def _exchange(self, block: int, now: int) -> int:
        """When the block was used last, or _UNUSED; it is used `now`."""
        cells, at = self._cells, block & self._cell_mask
        cell = block << _TIME_BITS | now
        first = cells[at]
        if first >> _TIME_BITS == block:
            cells[at] = cell
            return first & _TIME_MASK
        second = cells[at ^ 1]
        if second >> _TIME_BITS == block:
            cells[at ^ 1] = cell
            return second & _TIME_MASK
        # The older one is overwritten.
        cells[at if (now - first) & _TIME_MASK > (now - second) & _TIME_MASK else at ^ 1] = cell
        return _UNUSED


def _find_following(at: int) -> int:
    """The next position in the sample."""
    step = _DENSE_STEP if at < _DENSE_BLOCKS else _STEP
    return at - at % step + step
