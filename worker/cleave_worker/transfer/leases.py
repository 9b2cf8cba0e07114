"""Expiry times of the leases on finished prefills.

Used by the producer side of a KV transfer, emulated or real. Times are passed in, in seconds of any
monotonic clock.
"""

MAX_DURATIONS = 10
"""Longest total time of a lease, as a multiple of its duration."""


class LeaseTable:
    """Request ids with the time at which their blocks are freed."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._granted: dict[str, float] = {}
        self._expiry: dict[str, float] = {}

    @property
    def next_expiry(self) -> float | None:
        """When the next lease ends; None without leases."""
        return min(self._expiry.values(), default=None)

    def grant(self, request_id: str, now: float) -> None:
        """Start a lease."""
        self._expiry[request_id] = now + self._duration_s
        self._granted[request_id] = now

    def extend(self, request_id: str, now: float) -> None:
        """Extend a lease after a heartbeat to two thirds of its duration from now, as NIXL does,
        but not beyond MAX_DURATIONS: anybody who reaches the port may send heartbeats."""
        expiry = self._expiry.get(request_id)
        if expiry is not None:
            latest = self._granted[request_id] + MAX_DURATIONS * self._duration_s
            extended = min(now + self._duration_s * 2 / 3, latest)
            self._expiry[request_id] = max(expiry, extended)

    def end(self, request_id: str) -> bool:
        """End a lease; return whether it was still running."""
        self._granted.pop(request_id, None)
        return self._expiry.pop(request_id, None) is not None

    def expire(self, now: float) -> list[str]:
        """End the leases that are overdue and return their request ids."""
        expired = [request_id for request_id, expiry in self._expiry.items() if expiry <= now]
        for request_id in expired:
            self.end(request_id)
        return expired
