"""How many requests of a batch are sent at a time. Pure; time and randomness are passed in.

Used by `batch_run`. The gateway lets requests of a batch wait for idle capacity and refuses those
beyond what its queue takes. So the number here only has to keep that queue filled: it doubles with
each round of answers until the gateway refuses one, halves then, and from there grows by one each
round (additive increase, multiplicative decrease, as of TCP).
"""

import random

INITIAL_LIMIT = 8.0
MAX_DELAY_S = 60.0
SPREAD = 0.5
"""Delays are up to so much longer, at random, so that batches do not all return at once."""


class Pacer:
    """Counts the requests in flight of one run."""

    def __init__(self, max_running: int, rng: random.Random) -> None:
        """`max_running`: limit of requests at a time."""
        self.limit = min(INITIAL_LIMIT, float(max_running))
        self.num_running = 0
        self.resume_at = 0.0
        """Seconds, before which no request may start."""
        self._max_running = max_running
        self._rng = rng
        self._num_refused = 0
        """Refusals since the latest answer, those of one round counted once."""
        self._decreased_at = -1.0
        self._has_decreased = False

    def may_start(self, now: float) -> bool:
        """Whether one more request may be sent."""
        return self.num_running + 1 <= self.limit and now >= self.resume_at

    def start(self) -> None:
        """A request is sent."""
        self.num_running += 1

    def finish(self) -> None:
        """A request has ended, in any way; `grow` or `reduce` follows, or neither."""
        self.num_running -= 1

    def grow(self) -> None:
        """A request was answered."""
        self._num_refused = 0
        step = 1.0 / self.limit if self._has_decreased else 1.0
        self.limit = min(self.limit + step, float(self._max_running))

    def reduce(self, sent_at: float, now: float, retry_after_s: float | None) -> float:
        """A request was refused; the delay, in seconds, after which it may be sent again.
        `retry_after_s`: what the gateway asks for; None: 1 s, twice as long each time."""
        if sent_at > self._decreased_at:
            # Requests that were sent before say nothing about the smaller number.
            self.limit = max(1.0, self.limit / 2)
            self._decreased_at, self._has_decreased = now, True
            self._num_refused += 1
        delay_s = 2.0 ** (self._num_refused - 1) if retry_after_s is None else retry_after_s
        delay_s = min(delay_s, MAX_DELAY_S) * (1 + SPREAD * self._rng.random())
        self.resume_at = max(self.resume_at, now + delay_s)
        return delay_s
