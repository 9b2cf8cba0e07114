"""Pins sessions, adapters and computed prompts to instances. Called by the router.

Rendezvous hashing: the instance with the highest hash of both names. All gateways compute the same
instance without communication, and when instances are added or removed only their sessions move.
"""

from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from cleave.policy.dispatch import NONE, TO_DECODE, TO_PREFILL, Scores, find_least

Keys = NDArray[np.uint64]

ADAPTER_TOKENS = 2_048.0
"""How many more tokens an instance with the adapter may have pending or resident than others: about
the cost of loading the adapter on another instance."""

_MIX_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MIX_SHIFT = np.uint64(32)


def to_key(name: str | bytes) -> int:
    """The 32-bit key of a session or an instance."""
    return crc32(name.encode() if isinstance(name, str) else name)


def find_session_instance(scores: Scores, keys: Keys, session: int, margin: float) -> int:
    """Slot of the session's instance; NONE when all are closed.

    `keys`: keys of the instances, one per score. `margin`: instances whose score exceeds the least
    one by more than this are not considered; it is the most that a cache hit can save, the tokens
    of the prompt.
    """
    least = find_least(scores)
    if least == NONE:
        return NONE
    mixed = (keys ^ np.uint64(session)) * _MIX_MULTIPLIER
    mixed = (mixed ^ (mixed >> _MIX_SHIFT)) * _MIX_MULTIPLIER
    mixed >>= _MIX_SHIFT
    mixed[scores > scores[least] + margin] = 0
    return int(mixed.argmax())


def find_attached(
    scores: Scores,
    pending_prompt: Scores,
    keys: Keys,
    purpose: int,
    session: int | None,
    adapter: int | None,
    prompt_tokens: int,
) -> int:
    """Slot to which a request's session or adapter is pinned; NONE: not pinned, or all are closed.

    `purpose`: TO_PREFILL, TO_DECODE or TO_WHOLE. A session is pinned to the instance that computes
    its prompts. The cost of returning to it is its prompt queue, so slots are compared by
    `pending_prompt` tokens; only an adapter that also decodes there is compared by `scores`.
    """
    if session is not None and purpose != TO_DECODE:
        return find_session_instance(_mask(pending_prompt, scores), keys, session, prompt_tokens)
    if adapter is None:
        return NONE
    compared = _mask(pending_prompt, scores) if purpose == TO_PREFILL else scores
    return find_session_instance(compared, keys, adapter, ADAPTER_TOKENS)


def goes_back(queue: float, queue_elsewhere: float, cached_tokens: float) -> bool:
    """Whether a prompt returns to the instance that has cached `cached_tokens` of it. As in
    `find_session_instance`, its `queue` may be longer than others by the cached tokens."""
    return queue <= queue_elsewhere + cached_tokens


def _mask(tokens: Scores, scores: Scores) -> Scores:
    """`tokens` where `scores` are open."""
    return np.where(scores < np.inf, tokens, scores)
