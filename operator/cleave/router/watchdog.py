"""Watchdog timer for periodic checks of peers that accounts for stalls of this process itself.

Used by the gateway's sweeper, its parent process and `router.agent_watcher`. What is hard: after a
stall (a callback that took seconds, a starved or frozen container) a process has not read its
sockets for that time, and timers run before sockets are read. So a late tick is ignored once: data
that arrived in the meantime is read first.
"""

import asyncio
import time
from collections.abc import Callable

MIN_STALL_S = 0.5
"""A timer that is later than this was delayed by a stall; shorter than any timeout for peers."""


class WatchdogTimer:
    """Ticks once per period, measured from tick to tick, so that stalls during a check count."""

    def __init__(self, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._period_s = period_s
        self._clock = clock
        self._period_started = clock()
        self.stall_s = 0.0
        """How long this process stalled before this tick; 0: no stall."""
        self.is_reliable = True
        """Whether a peer's silence is its fault: this tick is on time, or the last was ignored."""

    async def wait(self) -> None:
        """Sleep until the next tick."""
        await asyncio.sleep(self._period_s)
        self.tick()

    def restart(self) -> None:
        """Restart the period: the time that the check has awaited is not a stall."""
        self._period_started = self._clock()

    def tick(self) -> None:
        """Record a tick."""
        began, self._period_started = self._period_started, self._clock()
        late_s = self._period_started - began - self._period_s
        self.stall_s = late_s if late_s > MIN_STALL_S else 0.0
        # A process that is always late also reads sockets between ticks: every other tick counts.
        self.is_reliable = self.stall_s == 0.0 or not self.is_reliable


def is_overdue(limit: asyncio.Timeout) -> bool:
    """Whether an expired timeout fired so late that this process must have stalled."""
    due = limit.when()
    return due is not None and asyncio.get_running_loop().time() - due > MIN_STALL_S
