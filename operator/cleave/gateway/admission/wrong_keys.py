"""Limits how fast clients can try keys: per address, and all together. No I/O.

Used by the client connections. Right keys are never delayed: a key is compared first (its hash is),
so clients behind the address of one that guesses are served as before. A wrong one beyond the
limits is answered late, and its connection is closed. What is hard: an enemy may have any number of
addresses. So they share a fixed number of token buckets, by a hash that has a seed of its own in
each process.
"""

from array import array

SLOTS = 4_096
BURST = 20
"""Wrong keys of an address that are answered at once: a program that was given an old key."""
PER_SECOND = 0.5
TOTAL_BURST = 400
TOTAL_PER_SECOND = 20.0


class WrongKeys:
    """The wrong keys of one process."""

    def __init__(self) -> None:
        # One more for all addresses together.
        self._left = array("d", [BURST] * SLOTS + [TOTAL_BURST])
        self._counted_at = array("d", bytes(8 * (SLOTS + 1)))

    def record(self, address: str, now: float) -> bool:
        """A client has sent a wrong key; whether it may be answered at once."""
        is_own_left = self._take(hash(address) % SLOTS, now, PER_SECOND, BURST)
        return self._take(SLOTS, now, TOTAL_PER_SECOND, TOTAL_BURST) and is_own_left

    def _take(self, slot: int, now: float, per_second: float, burst: float) -> bool:
        grown = (now - self._counted_at[slot]) * per_second
        left = min(self._left[slot] + grown, burst)
        self._counted_at[slot] = now
        self._left[slot] = left if left < 1 else left - 1
        return left >= 1
