"""Which instance a session keeps coming back to. Called by the router.

The instance that scores highest in a hash of both names (rendezvous hashing): every gateway finds
the same one without asking, and when instances come or go only their own sessions move.
"""

from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from cleave.policy.dispatch import NONE, Scores, find_least

Keys = NDArray[np.uint64]

_ODD = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)


def to_key(name: str | bytes) -> int:
    """The number that stands for a session or an instance."""
    return crc32(name.encode() if isinstance(name, str) else name)


def find_kept(scores: Scores, keys: Keys, session: int, worth: float) -> int:
    """Slot of the session's instance, or the least of all `scores`; NONE when all are closed.

    `keys`: of the instances, as many as scores. `worth`: how much longer its own instance's queue
    may be than the shortest: what coming back saves at most, the tokens of the prompt.
    """
    least = find_least(scores)
    if least == NONE:
        return NONE
    mixed = (keys ^ np.uint64(session)) * _ODD
    mixed = (mixed ^ (mixed >> _HALF)) * _ODD
    mixed >>= _HALF
    mixed[scores > scores[least] + worth] = 0
    return int(mixed.argmax())
