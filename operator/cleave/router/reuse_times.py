"""After how long prompts are used again: what prefix caches of any size would find. Called by the
router for each prompt that it sends.

Blocks of prompts are sampled by their hash, as SHARDS samples a cache's references (Waldspurger et
al., FAST 2015, section 3): a block is in the sample at each of its uses or at none. The time since
a use is recorded, not the distance in other blocks: it does not depend on the rate or on how many
gateways there are, and `traffic.reuse_curve` computes the hit share of each cache size from it.
Memory is constant; where it is short, what was used longest ago counts as new.

What is hard: a system prompt is used by all requests, so its few blocks in the sample would stand
for too much or too little. But a prompt's beginning was used whenever its continuation was, so
times never fall along a prompt. So a sampled block stands for what lies between it and the sampled
one before, and the first block, the last one and the last known one are always in the sample.
"""

from bisect import bisect_left
from collections.abc import Sequence

from cleave.policy.prefix_cache import BLOCK_ENDS, estimate_cached_tokens
from cleave.router.prefix_index import PrefixMemory
from cleave.router.routing_request import RoutingRequest

BOUNDS_S = tuple(2.0**step for step in range(-1, 14))
"""Half a second to two hours."""
_NUM_DENSE = 8
_DENSE_MASK, _SAMPLED_MASK = 1, 7
"""One block of so many, plus one, is in the sample: of the first ones, among which system prompts
end, and of the others."""
_CELL_SHIFT = 3
"""Bits of a block's hash that do not select its cell, as they are those of the sample."""
_TICKS_PER_S = 8
_TIME_BITS = 28
_TIME_MASK = (1 << _TIME_BITS) - 1
"""A cell: the 32 bits of a block, and when it was used, in ticks; these wrap around in a year."""
_UNUSED = -1


class ReuseTimes:
    """Prompt tokens of one model by the time since they were used before."""

    __slots__ = ("_tokens",)

    def __init__(self) -> None:
        self._tokens = [0.0] * (len(BOUNDS_S) + 1)
        """By bound, and at the end those of new prompts."""

    def add(self, tokens: float, age_s: float) -> None:
        """Count tokens that were used `age_s` seconds ago."""
        self._tokens[bisect_left(BOUNDS_S, age_s)] += tokens

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
    in `PrefixIndex` there is no lock: a lost cell counts as new."""

    __slots__ = ("_cell_mask", "_cells")

    def __init__(self, memory: PrefixMemory) -> None:
        self._cells: memoryview[int] = memoryview(memory.last_uses).cast("q")
        self._cell_mask = len(self._cells) - 1

    def record(self, request: RoutingRequest, now_s: float, times: ReuseTimes) -> None:
        """Count a prompt in `times` by the last uses of its blocks, and note this one."""
        blocks, known, tokens = request.blocks, request.known, float(request.prompt_tokens)
        now, last, counted, age = int(now_s * _TICKS_PER_S) & _TIME_MASK, len(blocks) - 1, 0.0, -1
        for at in range(len(blocks)):
            block = blocks[at]
            mask = _DENSE_MASK if at < _NUM_DENSE else _SAMPLED_MASK
            if block & mask and 0 < at < last and at != known - 1:
                continue
            used = self._exchange(block, now)
            if at >= known:
                continue
            # A block that is in an earlier prompt, but not in its sample: as the one before it.
            age = (now - used) & _TIME_MASK if used != _UNUSED else age
            end = tokens * BLOCK_ENDS[at] / request.text_bytes
            if at == known - 1:
                end = estimate_cached_tokens(known, request.text_bytes, request.prompt_tokens)
            if age >= 0:
                times.add(end - counted, age / _TICKS_PER_S)
                counted = end
        times.add_new(tokens - counted)

    def _exchange(self, block: int, now: int) -> int:
        """When the block was used last, or _UNUSED; it is used `now`."""
        cells = self._cells
        at = block >> _CELL_SHIFT & self._cell_mask
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
