"""Bounds the share of a core that the events of one agent take.

Used by the agent watcher: an agent that sends without end must not take time from requests. What is
hard: events differ a thousandfold in cost, and honest agents send several at once when they change.
So time is counted, not events, and some of it is saved up.
"""

import time
from collections.abc import Callable

SHARE = 0.02
"""Of a core. An agent that reports ten times a second takes a tenth of it."""
_SAVED_S = 0.25
"""CPU time that a quiet agent has saved up."""
_EVENT_S = 0.000_25
_BYTE_S = 2e-9
"""What gRPC takes for an event and for each of its bytes, which cannot be measured here."""


class EventBudget:
    """The CPU time of one agent."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._left_s = _SAVED_S
        self._updated_s = clock()

    def count(self, seconds: float, size: int) -> float:
        """Count an event of `size` bytes that took `seconds` of CPU time; return how long the next
        one has to wait, in seconds: 0 for an agent that keeps within its share."""
        now_s = self._clock()
        earned_s = SHARE * (now_s - self._updated_s)
        self._left_s = min(self._left_s + earned_s, _SAVED_S)
        self._left_s -= seconds + _EVENT_S + _BYTE_S * size
        self._updated_s = now_s
        return max(-self._left_s / SHARE, 0.0)
