"""How engines behave, as their requests show it: who fails again and again, who has stopped moving.

Kept by the gateway for all its requests. What is hard: neither may take healthy instances away.
A failing instance is only doubted, never closed: it comes after all others, is tried again after a
while, and serves if nothing else is left. And an engine counts as hung only when none of its
streams moves for far longer than it ever paused; a single stream may wait for many reasons.
"""

from dataclasses import dataclass

FAILURES = 3
"""One after another, of as many requests, before an instance is doubted."""
FIRST_DOUBT_S = 1.0
LAST_DOUBT_S = 30.0

PATIENCE = 8.0
"""So many times the longest pause of late is no pause any more."""
LEAST_PATIENCE_S = 3.0
FIRST_PAUSE_S = 1.5
"""Assumed of an instance that has shown none yet."""
FORGETTING = 0.999
"""What is left of the longest pause one beat, at most one each sweep, later."""


@dataclass(slots=True)
class Standing:
    """What one instance has done of late."""

    failures: int = 0
    doubt_s: float = 0.0
    until: float = 0.0


class Breaker:
    """Instances by name that let requests down."""

    def __init__(self) -> None:
        self.standing: dict[str, Standing] = {}
        """Of instances that let requests down of late; mostly none, then there is nothing to do."""

    def fail(self, instance: str, now: float, *, surely: bool = False) -> None:
        """A request was let down there; `surely`: doubt it without waiting for more."""
        standing = self.standing.setdefault(instance, Standing())
        standing.failures += 1
        if surely or standing.failures >= FAILURES:
            standing.doubt_s = min(max(2 * standing.doubt_s, FIRST_DOUBT_S), LAST_DOUBT_S)
            standing.until = now + standing.doubt_s

    def succeed(self, instance: str) -> None:
        """A request was answered there: all is forgotten."""
        self.standing.pop(instance, None)

    def doubted(self, now: float) -> frozenset[str]:
        """Who comes last now. After its time an instance is tried like any other."""
        return frozenset(name for name, one in self.standing.items() if one.until > now)

    def sweep(self, now: float) -> None:
        """Forget who has not been heard of for long."""
        for name, one in tuple(self.standing.items()):
            if now > one.until + LAST_DOUBT_S:
                del self.standing[name]


@dataclass(slots=True)
class Pulse:
    """Whether one boot of an engine moves, over all streams that it sends here."""

    last: float
    """Seconds, when any stream moved or began."""
    pause_s: float = FIRST_PAUSE_S
    """The longest time of late in which none did."""

    def beat(self, now: float) -> None:
        """A stream moved since the last sweep; many may say so in one."""
        if now > self.last:
            self.pause_s = max(now - self.last, self.pause_s * FORGETTING)
            self.last = now

    def excuse(self, pause_s: float, now: float) -> None:
        """This process stood still for so long: that none moved meanwhile tells nothing."""
        self.last = min(self.last + pause_s, now)

    def patience_s(self) -> float:
        """How long none may move before the engine counts as hung."""
        return max(PATIENCE * self.pause_s, LEAST_PATIENCE_S)
