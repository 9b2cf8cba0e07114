"""Which instance takes a request: least pending tokens. Called by the router for every request.

Pure functions over one float64 array per phase; a closed instance carries +inf, so that roles,
health and retries are all one thing: masking. Only argmin, comparison and indexing are used, the
subset that numba compiles, because a simulator calls the same functions millions of times.

Sources: DistServe section 4.3 (prefill to the shortest queue, decode to the least loaded
instance), Splitwise section IV-A (join the shortest queue, counted in pending tokens).
What is hard: both instances are chosen at once, before the prompt runs, because a prefill
instance whose decode side has no room would hold its KV blocks for nothing.
"""

import math

import numpy as np
from numpy.typing import NDArray

Scores = NDArray[np.float64]

NONE = -1
"""No slot."""

RECENCY = 1e-9
"""Weight, in tokens, of one pick's age: far below one token, so that it only breaks ties."""

STALE = 1e9
"""Tokens added to all scores of an instance that is in doubt: far above what any can hold."""


def find_least(scores: Scores) -> int:
    """Slot with the lowest score; NONE when all are closed or there are none."""
    if scores.size == 0:
        return NONE
    slot = int(scores.argmin())
    return NONE if float(scores[slot]) == math.inf else slot


def choose_pair(
    prefill: Scores, decode: Scores, mixed: Scores, pending_prompt: Scores
) -> tuple[int, int]:
    """(prefill slot, decode slot) for a request that may be split; (NONE, slot): both phases there.

    All in tokens, of equal length or empty when all are closed: `prefill` over prefill instances,
    `decode` over all that decode, `mixed` over mixed instances serving a whole request,
    `pending_prompt` over all of them, without masks.
    A mixed instance is taken when its prompt queue is the shorter one, which saves the transfer;
    when equal, the split is taken because that is what the placement was planned for. It is taken
    as well when a half of the split is in doubt (STALE in its scores) and the mixed one is not.
    """
    first = find_least(prefill)
    second = find_least(decode) if first != NONE else NONE
    whole = find_least(mixed)
    if second == NONE:
        return NONE, whole
    if whole != NONE and (
        pending_prompt[whole] < prefill[first] - 1.0
        or pending_prompt[whole] < STALE <= decode[second]
    ):
        return NONE, whole
    return first, second


def close_slots(scores: Scores, slots: list[int]) -> Scores:
    """A copy of `scores` in which `slots` are closed as well."""
    masked = scores.copy()
    if masked.size > 0:
        masked[slots] = np.inf
    return masked
