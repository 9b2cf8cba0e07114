"""Time as a run has it on a machine that others use as well.

Waits of a run are bounded by it: a fleet that gets a tenth of a processor needs ten times as long
to be whole again, and that is no fault of it. The kernel says how long this process has waited for
a processor, and how long it had one; the processes of the fleet fare alike.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

LEAST_SHARE = 0.1
"""However little this process gets, a wait ends after ten times its length."""
LEAST_WORK_S = 0.005
"""With less work in between than this nothing can be said."""
MOST_LOOKS = 4_096
_SCHEDSTAT = Path("/proc/self/schedstat")


@dataclass
class Beat:
    """A clock that goes slower while this process has to wait for a processor."""

    now_s: float = 0.0
    least_share: float = 1.0
    """Of the processor time that it asked for between two looks."""
    _shares: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MOST_LOOKS))
    """When it looked, by the monotonic clock, and its share since the look before."""
    _looked_s: float = field(init=False)
    _had_s: float = field(init=False)
    _waited_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._looked_s = time.monotonic()
        self._had_s, self._waited_s = read_schedstat()

    def look(self) -> float:
        """Seconds, from any beginning; call it at least every few seconds."""
        now_s = time.monotonic()
        read = read_schedstat()
        had_s, waited_s = read[0] - self._had_s, read[1] - self._waited_s
        share = 1.0
        if had_s + waited_s > LEAST_WORK_S:
            share = max(had_s / (had_s + waited_s), LEAST_SHARE)
            self.least_share = min(self.least_share, share)
            self._shares.append((now_s, share))
        self.now_s += (now_s - self._looked_s) * share
        self._looked_s = now_s
        self._had_s, self._waited_s = read
        return self.now_s

    def find_least_share(self, began_s: float, ended_s: float) -> float:
        """The least of a span of the monotonic clock."""
        return min((share for at, share in self._shares if began_s <= at <= ended_s), default=1.0)


def read_schedstat() -> tuple[float, float]:
    """Seconds for which this process had a processor, and for which it waited for one."""
    had_ns, waited_ns, _ = map(int, _SCHEDSTAT.read_text().split())
    return had_ns / 1e9, waited_ns / 1e9
