"""How long the blocks of a finished prefill are kept for the instance that will pull them.

Owned by the prefill side of a hand-off, emulated or real; time is passed in, in seconds of any
monotonic clock.
"""


class Leases:
    """Request ids with the time at which their blocks are freed."""

    def __init__(self, duration_s: float) -> None:
        self._duration_s = duration_s
        self._expiry: dict[str, float] = {}

    @property
    def next_expiry(self) -> float | None:
        """When the next lease ends; None when there is none."""
        return min(self._expiry.values(), default=None)

    def grant(self, request_id: str, now: float) -> None:
        """Start a lease."""
        self._expiry[request_id] = now + self._duration_s

    def extend(self, request_id: str, now: float) -> None:
        """A heartbeat came: keep the blocks for two thirds of a lease from now, as NIXL does."""
        expiry = self._expiry.get(request_id)
        if expiry is not None:
            self._expiry[request_id] = max(expiry, now + self._duration_s * 2 / 3)

    def end(self, request_id: str) -> bool:
        """The blocks were pulled or are not wanted; whether the lease was still on."""
        return self._expiry.pop(request_id, None) is not None

    def expire(self, now: float) -> list[str]:
        """End the leases whose time is over and return their request ids."""
        over = [request_id for request_id, expiry in self._expiry.items() if expiry <= now]
        for request_id in over:
            del self._expiry[request_id]
        return over
