"""Rate limits of one tenant: requests and tokens a minute, concurrent requests. Pure; time is
passed in.

Used by the admission controller for every request of a tenant with limits. What is hard: the length
of an output is known only at its end, so its tokens are charged then, and a tenant that has
overdrawn its limit waits.
"""

from dataclasses import dataclass

MINUTE_S = 60.0
LEAST_S = 1e-6
"""Shorter waits count as none, because sums of floats are not exact."""


class Bucket:
    """An allowance that refills continuously; a minute's worth may be used at once.

    Its state is the time at which it is full again (the generic cell rate algorithm, ITU-T I.371).
    """

    __slots__ = ("_full_at", "_per_minute")

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_minute = per_minute
        self._full_at = now

    def look(self) -> None:
        """Load what other processes have used; called before any other method."""

    def find_wait_s(self, amount: float, now: float) -> float:
        """Seconds until so much may be used; 0: now. For more than a minute's worth, until it is
        full."""
        needed_s = min(amount / self._per_minute, 1.0) * MINUTE_S
        wait_s = self._full_at - now + needed_s - MINUTE_S
        return wait_s if wait_s > LEAST_S else 0.0

    def use(self, amount: float, now: float) -> None:
        """Charge an amount, even if it exceeds the allowance."""
        self._full_at = max(self._full_at, now) + amount / self._per_minute * MINUTE_S

    def resize(self, per_minute: float) -> None:
        """Set another allowance."""
        self._per_minute = per_minute


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a tenant's request is refused."""

    reason: str
    """Label of the metric and code of the error."""
    message: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a tenant; 0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Of prompts and outputs."""
    max_concurrent: int = 0
    """Requests that are queued or running."""


class Account:
    """What one tenant uses."""

    __slots__ = ("_limits", "_requests", "_tokens", "running")

    def __init__(self, limits: Limits, now: float) -> None:
        self.running = 0
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._limits = limits
        self.change(limits, now)

    def change(self, limits: Limits, now: float) -> None:
        """Set other limits."""
        self._limits = limits
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        self._requests = self._resize(self._requests, requests, now, of_tokens=False)
        self._tokens = self._resize(self._tokens, tokens, now, of_tokens=True)

    def enter(self, prompt_tokens: int, now: float) -> Refusal | None:
        """Charge a new request; a refused request is not charged."""
        limits = self._limits
        if limits.max_concurrent and self.count_running() >= limits.max_concurrent:
            message = f"more than {limits.max_concurrent} requests at a time"
            return Refusal("concurrency_limit", message, 1.0)
        requests, tokens = self._requests, self._tokens
        if requests is not None:
            requests.look()
            if wait_s := requests.find_wait_s(1, now):
                message = f"more than {limits.requests_per_minute} requests a minute"
                return Refusal("request_rate_limit", message, wait_s)
        if tokens is not None:
            tokens.look()
            if wait_s := tokens.find_wait_s(prompt_tokens, now):
                message = f"more than {limits.tokens_per_minute} tokens a minute"
                return Refusal("token_rate_limit", message, wait_s)
        if requests is not None:
            requests.use(1, now)
        if tokens is not None:
            tokens.use(prompt_tokens, now)
        self.running += 1
        return None

    def leave(self, output_tokens: int, now: float) -> None:
        """An admitted request has ended after so many output tokens."""
        self.running -= 1
        if self._tokens is not None:
            self._tokens.look()
            self._tokens.use(output_tokens, now)

    def count_running(self) -> int:
        """Requests that are queued or running."""
        return self.running

    def _resize(
        self, bucket: Bucket | None, per_minute: int, now: float, *, of_tokens: bool
    ) -> Bucket | None:
        if not per_minute:
            return None
        if bucket is None:
            return self._open_bucket(of_tokens, per_minute, now)
        bucket.resize(per_minute)
        return bucket

    def _open_bucket(self, of_tokens: bool, per_minute: int, now: float) -> Bucket:
        del of_tokens
        return Bucket(per_minute, now)
