"""Which instance serves a session. Called by the router.

Rendezvous hashing: the instance with the highest hash of both names. All gateways compute the same
instance without communication, and when instances come or go only their own sessions move.
"""

from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from cleave.policy.dispatch import NONE, Scores, find_least

Keys = NDArray[np.uint64]

_ODD = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


def to_key(name: str | bytes) -> int:
    """The 32-bit key of a session or an instance."""
    return crc32(name.encode() if isinstance(name, str) else name)


def find_kept(scores: Scores, keys: Keys, session: int, worth: float) -> int:
    """Slot of the session's instance; NONE when all are closed.

    `keys`: keys of the instances, one per score. `worth`: instances whose score exceeds the least
    one by more than this are not considered; it is the most that a cache hit can save, the tokens
    of the prompt.
    """
    least = find_least(scores)
    if least == NONE:
        return NONE
    mixed = (keys ^ np.uint64(session)) * _ODD
    mixed = (mixed ^ (mixed >> _HALF)) * _ODD
    mixed >>= _HALF
    mixed[scores > scores[least] + worth] = 0
    return int(mixed.argmax())
