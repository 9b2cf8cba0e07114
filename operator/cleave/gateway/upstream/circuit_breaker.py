"""Failure detection from the requests themselves: repeated failures and stalled streams.

One CircuitBreaker per gateway process, one StallDetector per engine boot. What is hard: neither may
take healthy instances out of service. A failing instance is only a suspect, never excluded: it is
picked after all others, is tried again after a while, and serves if no other is left. An engine
counts as hung only when none of its streams has progressed for far longer than its longest recent
pause; a single stream may wait for many reasons.
"""

from dataclasses import dataclass

FAILURES = 3
"""Consecutive failed requests before an instance becomes a suspect."""
FIRST_DOUBT_S = 1.0
LAST_DOUBT_S = 30.0

PATIENCE = 8.0
"""Multiple of the longest recent pause after which the engine counts as hung."""
LEAST_PATIENCE_S = 3.0
FIRST_PAUSE_S = 1.5
"""Assumed for an instance without any observed pause."""
FORGETTING = 0.999
"""Factor on the longest pause for each record of progress, at most one per sweep."""


@dataclass(slots=True)
class Standing:
    """Recent failures of one instance."""

    failures: int = 0
    doubt_s: float = 0.0
    until: float = 0.0


class Breaker:
    """Counts failures by instance name and lists the suspects."""

    def __init__(self) -> None:
        self.standing: dict[str, Standing] = {}
        """Instances with recent failures; mostly empty, and then callers skip the look-up."""

    def fail(self, instance: str, now: float, *, surely: bool = False) -> None:
        """A request failed there; `surely`: suspect the instance without waiting for more
        failures."""
        standing = self.standing.setdefault(instance, Standing())
        standing.failures += 1
        if surely or standing.failures >= FAILURES:
            standing.doubt_s = min(max(2 * standing.doubt_s, FIRST_DOUBT_S), LAST_DOUBT_S)
            standing.until = now + standing.doubt_s

    def succeed(self, instance: str) -> None:
        """A request succeeded there: clear its failures."""
        self.standing.pop(instance, None)

    def doubted(self, now: float) -> frozenset[str]:
        """Instances to pick last. After `until` a suspect is picked like any other."""
        return frozenset(name for name, state in self.standing.items() if state.until > now)

    def sweep(self, now: float) -> None:
        """Remove instances without failures for LAST_DOUBT_S."""
        for name, state in tuple(self.standing.items()):
            if now > state.until + LAST_DOUBT_S:
                del self.standing[name]


@dataclass(slots=True)
class Pulse:
    """Detects a hung engine: one boot, over all its streams to this gateway process."""

    last: float
    """Seconds, when any stream last progressed or began."""
    pause_s: float = FIRST_PAUSE_S
    """The longest recent time without progress on any stream."""

    def beat(self, now: float) -> None:
        """A stream has progressed since the last sweep; several may report it in one sweep."""
        if now > self.last:
            self.pause_s = max(now - self.last, self.pause_s * FORGETTING)
            self.last = now

    def excuse(self, pause_s: float, now: float) -> None:
        """The gateway process stood still for so long, so that time is not counted as a pause."""
        self.last = min(self.last + pause_s, now)

    def patience_s(self) -> float:
        """Seconds without progress after which the engine counts as hung."""
        return max(PATIENCE * self.pause_s, LEAST_PATIENCE_S)
