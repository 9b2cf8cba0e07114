"""Watchdog ticks: periodic checks of engines, agents and processes, aware of this process's stalls.

Used by the gateway's sweeper, its parent process and the fleet. What is hard: after a stall (a
callback that took seconds, a starved or frozen container) a process has read no socket for as long,
and timers run before sockets are read. So a tick that comes late is skipped once: what has arrived
meanwhile is read first.
"""

import asyncio
import time
from collections.abc import Callable

LEAST_PAUSE_S = 0.5
"""A timer that is so late was held up by this process; shorter than any time-out for others."""


class Rounds:
    """One tick each period, measured from tick to tick: a stall during a check counts as well."""

    def __init__(self, period_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._period_s = period_s
        self._clock = clock
        self._began = clock()
        self.pause_s = 0.0
        """How long this process stalled before this tick; 0: it did not."""
        self.is_fair = True
        """Whether the tick is on time, or every other one of a process that is always late: time
        without news of others is their fault."""

    async def wait(self) -> None:
        """Sleep until the next tick."""
        await asyncio.sleep(self._period_s)
        self.note()

    def begin(self) -> None:
        """The period begins now; what the check awaited until here is no stall."""
        self._began = self._clock()

    def note(self) -> None:
        """The next tick is here."""
        began, self._began = self._began, self._clock()
        late_s = self._began - began - self._period_s
        self.pause_s = late_s if late_s > LEAST_PAUSE_S else 0.0
        # A process that is always late reads sockets between two checks, too: every other counts.
        self.is_fair = self.pause_s == 0.0 or not self.is_fair


def is_overdue(limit: asyncio.Timeout) -> bool:
    """Whether a time-out that was hit came so late that this process itself stood still."""
    due = limit.when()
    return due is not None and asyncio.get_running_loop().time() - due > LEAST_PAUSE_S
