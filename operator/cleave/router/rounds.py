"""Rounds of those that judge others by a clock: the gateway's sweeper and parent, the fleet.

What is hard: a process that stood still itself (a callback that took seconds, a starved or frozen
container) finds, when it goes on, that it has heard nothing for as long, for timers come before
sockets. So a round that comes late judges nobody: what has come meanwhile is read first.
"""

import asyncio
import time

LEAST_PAUSE_S = 0.5
"""What comes so late was held up by this process itself; less than any time that others have."""


class Rounds:
    """One round each period."""

    def __init__(self, period_s: float) -> None:
        self._period_s = period_s
        self.pause_s = 0.0
        """How long this process stood still before this round; 0: it did not."""
        self.is_fair = True
        """Whether others can be judged in this round."""

    async def wait(self) -> None:
        """For the next round."""
        began = time.monotonic()
        await asyncio.sleep(self._period_s)
        self.note(time.monotonic() - began)

    def note(self, waited_s: float) -> None:
        """The next round has come, after so long a wait."""
        late_s = waited_s - self._period_s
        self.pause_s = late_s if late_s > LEAST_PAUSE_S else 0.0
        # A process that is always late reads between two rounds, too: it judges in every other one.
        self.is_fair = self.pause_s == 0.0 or not self.is_fair


def is_overdue(limit: asyncio.Timeout) -> bool:
    """Whether a time-out that was hit came so late that this process itself stood still."""
    due = limit.when()
    return due is not None and asyncio.get_running_loop().time() - due > LEAST_PAUSE_S
