"""Periodic checks of engines, agents and processes by a clock, and pauses of this process itself.

Used by the gateway's sweeper, its parent process and the fleet. What is hard: after a pause of its
own (a callback that took seconds, a starved or frozen container) a process has heard nothing for as
long, and timers run before sockets are read. So a check that comes late is skipped once: what has
arrived meanwhile is read first.
"""

import asyncio
import time

LEAST_PAUSE_S = 0.5
"""A timer that is so late was held up by this process; shorter than any time-out for others."""


class Rounds:
    """One check each period."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self.pause_s = 0.0
        """How long this process stood still before this check; 0: it did not."""
        self.is_fair = True
        """Whether others can be judged now."""

    async def wait(self) -> None:
        """Sleep until the next check."""
        began = time.monotonic()
        await asyncio.sleep(self._period_s)
        self.note(time.monotonic() - began)

    def note(self, waited_s: float) -> None:
        """The next check is due, after a wait of so many seconds."""
        late_s = waited_s - self._period_s
        self.pause_s = late_s if late_s > LEAST_PAUSE_S else 0.0
        # A process that is always late reads sockets between two checks, too: every other counts.
        self.is_fair = self.pause_s == 0.0 or not self.is_fair


def is_overdue(limit: asyncio.Timeout) -> bool:
    """Whether a time-out that was hit came so late that this process itself stood still."""
    due = limit.when()
    return due is not None and asyncio.get_running_loop().time() - due > LEAST_PAUSE_S
