"""The work queue of the controller: each key is processed by at most one worker at a time.

Filled by handlers, the periodic resync and the planner; emptied by the controller's workers. A key
that is added while it is processed is processed once more afterwards; added ten times while it
waits, it is processed once. (Same rules as client-go's workqueue.)
"""

import asyncio
import heapq
from collections.abc import Callable, Hashable
from itertools import count
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 60.0


class WorkQueue(Generic[K]):
    """Keys to process, for one event loop. `clock` returns seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ready: dict[K, None] = {}
        self._busy: set[K] = set()
        self._requeued: set[K] = set()
        self._delayed: list[tuple[float, int, K]] = []
        self._due: dict[K, float] = {}
        self._failures: dict[K, int] = {}
        self._sequence = count()
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        """Number of keys that are due."""
        return len(self._ready) + len(self._requeued)

    def add(self, key: K) -> None:
        """Process `key` as soon as possible."""
        if key in self._busy:
            self._requeued.add(key)
        else:
            self._ready.setdefault(key)
            self._wake.set()

    def add_after(self, key: K, delay_s: float) -> None:
        """Process `key` after a delay; an earlier due time stays."""
        if delay_s <= 0:
            self.add(key)
            return
        at = self._clock() + delay_s
        if self._due.get(key, at) < at:
            return
        self._due[key] = at
        heapq.heappush(self._delayed, (at, next(self._sequence), key))
        self._wake.set()

    def retry_with_backoff(self, key: K) -> float:
        """Process `key` again with exponential back-off; returns the delay in seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay_s = min(MAX_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures, 16))
        self.add_after(key, delay_s)
        return delay_s

    def reset_backoff(self, key: K) -> None:
        """Reset the back-off of `key`."""
        self._failures.pop(key, None)

    def forget(self, key: K) -> None:
        """Drop delay and back-off of a deleted object."""
        self._failures.pop(key, None)
        self._due.pop(key, None)

    async def take(self) -> K:
        """Wait for the next key and return it; it is busy until `mark_done`."""
        while True:
            self._promote()
            if self._ready:
                key = next(iter(self._ready))
                del self._ready[key]
                self._busy.add(key)
                if self._ready:
                    self._wake.set()
                return key
            self._wake.clear()
            try:
                async with asyncio.timeout(self._get_wait_s()):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def mark_done(self, key: K) -> None:
        """Mark the processing of `key` as finished."""
        self._busy.discard(key)
        if key in self._requeued:
            self._requeued.discard(key)
            self.add(key)

    def _promote(self) -> None:
        now = self._clock()
        while self._delayed and self._delayed[0][0] <= now:
            at, _, key = heapq.heappop(self._delayed)
            # Skip an entry that an earlier one has replaced.
            if self._due.get(key) == at:
                del self._due[key]
                self.add(key)

    def _get_wait_s(self) -> float | None:
        return max(0.0, self._delayed[0][0] - self._clock()) if self._delayed else None
