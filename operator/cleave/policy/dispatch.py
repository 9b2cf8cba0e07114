"""Which instance takes a request. Called by the router for every request.

Pure functions over one float64 array per phase; a closed instance carries +inf, so that roles,
health and retries are all one thing: masking. What the scores count is the policy: pending tokens,
requests, or when each had its last one (round robin). Only argmin, comparison and indexing are
used, the subset that numba compiles without memory of its own, because a simulator calls the same
functions millions of times.

Sources: DistServe section 4.3 (prefill to the shortest queue, decode to the least loaded
instance), Splitwise section IV-A (join the shortest queue, counted in pending tokens), TetriInfer
section 3.3.4 (instances with enough resources, two of them at random, the least heavy:light).
What is hard: both instances are chosen at once, before the prompt runs, because a prefill
instance whose decode side has no room would hold its KV blocks for nothing.
"""

import math
from enum import Enum

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]

Cells = NDArray[np.int64]
"""The cell of each slot, below the number of slots."""

NONE = -1
"""No slot."""

RECENCY = 1e-9
"""Weight, in tokens, of one pick's age: far below one token, so that it only breaks ties."""

STALE = 1e9
"""Tokens added to all scores of an instance that is in doubt: far above what any can hold."""


class Policy(Enum):
    """How a deployment's requests are spread, by the names users know."""

    SHORTEST_WAIT = "ShortestWait"
    """Prompts where the queue is predicted to be through first (`books.Queue`), decoding at the
    least tokens held."""
    PENDING_TOKENS = "PendingTokens"
    """Least tokens that wait or are held."""
    ROUND_ROBIN = "RoundRobin"
    RANDOM = "Random"
    LEAST_REQUESTS = "LeastRequests"
    """Join the shortest queue."""
    POWER_OF_TWO = "PowerOfTwo"
    """The less pending of two drawn ones."""
    LEAST_HEAVY = "LeastHeavy"
    """TetriInfer, section 3.3.4: `find_lightest` for decoding."""
    BEST_FIT = "BestFit"
    """Aladdin, section 4.2: `packing` for decoding."""
    PREFIX_AWARE = "PrefixAware"
    """Least pending tokens less what is cached: `prefixes`."""


HEAVY_OUTPUT_TOKENS = 128
"""Longer outputs are heavy decodes, others light (TetriInfer, section 5.1)."""

_DRAWS = 64
"""Attempts to draw an open instance before the least of all is taken instead."""


def find_least(scores: Scores) -> int:
    """Slot with the lowest score; NONE when all are closed or there are none."""
    if scores.size == 0:
        return NONE
    slot = int(scores.argmin())
    return NONE if float(scores[slot]) == math.inf else slot


def find_at_home(scores: Scores, away: NDArray[np.bool_], worth: float, now: float) -> int:
    """The least of one's own instances, unless one that is `away` is less by more than `worth`.

    Where several routers know of each other only what instances report now and then, all would
    choose the same ones; so they share them out, and what one of them sends its own it knows at
    once. Scores are of at least `now`, or of nothing at all.
    """
    near = find_least(np.where(away, np.inf, scores))
    far = find_least(np.where(away, scores, np.inf))
    if near == NONE or far == NONE:
        return near if far == NONE else far
    is_less = max(scores[far] - now, 0.0) + worth < scores[near] - now
    return far if is_less else near


def draw(seed: int, count: int) -> tuple[int, int]:
    """(next seed, a number below `count`): Park and Miller's generator; seeds are above 0."""
    seed = seed * 48271 % 2147483647
    return seed, seed * count // 2147483647


def find_sampled(scores: Scores, size: int, seed: int) -> tuple[int, int]:
    """(slot, next seed): the least of `size` open slots drawn at random.

    1 is random dispatch, 2 the power of two choices. When fewer are found, or all that are drawn
    are in doubt, it is the least of all.
    """
    best = NONE
    found = 0
    if scores.size > 0:
        for _ in range(_DRAWS):
            seed, slot = draw(seed, scores.size)
            if scores[slot] < STALE and slot != best:
                found += 1
                if best == NONE or scores[slot] < scores[best]:
                    best = slot
                if found == size:
                    break
    return best if best != NONE else find_least(scores), seed


def find_lightest(
    scores: Scores, room: Scores, heaviness: Scores, need: float, seed: int
) -> tuple[int, int]:
    """(slot, next seed): of two drawn from those with room, the one with the least heavy:light.

    All of equal length: `room` in tokens that nobody has claimed, `heaviness` as `weigh` gives it;
    `need`: tokens that the request will hold at its end. Without room anywhere that is found it is
    the least of all `scores`, which also breaks ties.
    """
    best = NONE
    found = 0
    if scores.size > 0:
        for _ in range(_DRAWS):
            seed, slot = draw(seed, scores.size)
            if scores[slot] < STALE and slot != best and room[slot] >= need:
                found += 1
                if best == NONE or (heaviness[slot], scores[slot]) < (
                    heaviness[best],
                    scores[best],
                ):
                    best = slot
                if found == 2:
                    break
    return best if best != NONE else find_least(scores), seed


def weigh(heavy: float, light: float) -> float:
    """Heavy to light decodes of an instance; one light one is added lest the ratio is endless."""
    return heavy / (light + 1.0)


def choose_pair(
    prefill: Scores, decode: Scores, mixed: Scores, pending_prompt: Scores
) -> tuple[int, int]:
    """(prefill slot, decode slot) for a request that may be split; (NONE, slot): both phases there.

    All of equal length or empty when all are closed: `prefill` over prefill instances,
    `decode` over all that decode, `mixed` over mixed instances serving a whole request,
    `pending_prompt` over all of them, in tokens and without masks.
    """
    first = find_least(prefill)
    second = find_least(decode) if first != NONE else NONE
    whole = find_least(mixed)
    if first == NONE or second == NONE or whole == NONE:
        return (first, second) if second != NONE else (NONE, whole)
    if serves_whole(pending_prompt[first], decode[second], pending_prompt[whole]):
        return NONE, whole
    return first, second


def serves_whole(queue: float, decode: float, queue_whole: float) -> bool:
    """Whether a mixed instance serves a request rather than a split.

    `queue`, `queue_whole`: prompt tokens that wait at the prefill and at the mixed instance, STALE
    added to what is in doubt; `decode`: score of the decode instance, of which that alone is read.
    A mixed instance is taken when its prompt queue is the shorter one, which saves the transfer;
    when equal, the split is taken because that is what the placement was planned for. It is taken
    as well when a half of the split is in doubt (STALE in its scores) and the mixed one is not.
    """
    return queue_whole < queue - 1.0 or queue_whole < STALE <= decode


def weigh_cells(
    prefill: Scores, decode: Scores, cells: Cells, weight: float, crossing: float
) -> Scores:
    """`prefill` with what a prompt meets in its cell, for hand-offs that had better stay there.

    Added is `weight` of the score of the cell's least decode instance; where hand-offs must leave
    the cell (`stay_in_cell`), that of the least of all, and `crossing`.
    """
    least = np.full(cells.size, np.inf)
    np.minimum.at(least, cells, decode)
    of_all = least.min()
    leaves = ~(least < _highest(of_all))
    ahead = np.where(leaves, weight * of_all + crossing, weight * least)
    total: Scores = prefill + ahead[cells]
    return total


def stay_in_cell(decode: Scores, cells: Cells, slot: int) -> Scores:
    """`decode` for hand-offs of the prefill instance at `slot`: closed outside its cell.

    Not when the cell's own are all closed, or all in doubt while others are not.
    """
    own: Scores = np.where(cells == cells[slot], decode, np.inf)
    return own if own.min() < _highest(decode.min()) else decode


def _highest(least: float) -> float:
    """What scores are below if they will do, given the least of all."""
    return STALE if least < STALE else math.inf


def close_slots(scores: Scores, slots: list[int]) -> Scores:
    """A copy of `scores` in which `slots` are closed as well."""
    masked = scores.copy()
    if masked.size > 0:
        masked[slots] = np.inf
    return masked
