"""Failure detection from the requests themselves: repeated failures and stalled streams.

One CircuitBreaker per gateway process, one StallDetector per engine boot. What is hard: neither may
take healthy instances out of service. A failing instance is only a suspect, never excluded: it is
picked after all others, is tried again after a while, and serves if no other is left. An engine
counts as hung only when none of its streams has progressed, and it has reported no step, for far
longer than its longest recent pause; a single stream may wait for many reasons.
"""

from dataclasses import dataclass

FAILURE_THRESHOLD = 3
"""Consecutive failed requests before an instance becomes a suspect."""
MIN_SUSPECT_S = 1.0
MAX_SUSPECT_S = 30.0

STALL_FACTOR = 8.0
"""Multiple of the longest recent pause after which the engine counts as hung."""
MIN_STALL_TIMEOUT_S = 3.0
INITIAL_PAUSE_S = 1.5
"""Assumed for an instance without any observed pause."""
PAUSE_DECAY = 0.999
"""Factor on the longest pause for each record of progress, at most one per sweep."""


@dataclass(slots=True)
class FailureState:
    """Recent failures of one instance."""

    failures: int = 0
    suspect_s: float = 0.0
    suspect_until: float = 0.0


class CircuitBreaker:
    """Counts failures by instance name and lists the suspects."""

    def __init__(self) -> None:
        self.failure_states: dict[str, FailureState] = {}
        """Instances with recent failures; mostly empty, and then most callers skip the look-up."""

    def record_failure(self, instance: str, now: float, *, immediately: bool = False) -> None:
        """A request failed there; `immediately`: suspect the instance at its first failure."""
        standing = self.failure_states.setdefault(instance, FailureState())
        standing.failures += 1
        if immediately or standing.failures >= FAILURE_THRESHOLD:
            standing.suspect_s = min(max(2 * standing.suspect_s, MIN_SUSPECT_S), MAX_SUSPECT_S)
            standing.suspect_until = now + standing.suspect_s

    def record_success(self, instance: str) -> None:
        """A request succeeded there: clear its failures."""
        self.failure_states.pop(instance, None)

    def list_suspects(self, now: float) -> frozenset[str]:
        """Instances to pick last. After `suspect_until` a suspect is picked like any other."""
        states = self.failure_states.items()
        return frozenset(name for name, state in states if state.suspect_until > now)

    def expire(self, now: float) -> None:
        """Remove instances without failures for MAX_SUSPECT_S."""
        for name, state in tuple(self.failure_states.items()):
            if now > state.suspect_until + MAX_SUSPECT_S:
                del self.failure_states[name]


@dataclass(slots=True)
class StallDetector:
    """Detects a hung engine: one boot, over all its streams to this gateway process."""

    last_progress_at: float
    """Seconds, when any stream last progressed or began, or the engine reported a step."""
    longest_pause_s: float = INITIAL_PAUSE_S
    """The longest recent time without progress."""

    def record_progress(self, now: float) -> None:
        """A stream has progressed since the last sweep, or a step was reported then; several may
        record it in one sweep."""
        if now > self.last_progress_at:
            pause_s = now - self.last_progress_at
            self.longest_pause_s = max(pause_s, self.longest_pause_s * PAUSE_DECAY)
            self.last_progress_at = now

    def discount_pause(self, pause_s: float, now: float) -> None:
        """The gateway process stood still for so long, so that time is not counted as a pause."""
        self.last_progress_at = min(self.last_progress_at + pause_s, now)

    def compute_stall_timeout_s(self) -> float:
        """Seconds without progress after which the engine counts as hung."""
        return max(STALL_FACTOR * self.longest_pause_s, MIN_STALL_TIMEOUT_S)
