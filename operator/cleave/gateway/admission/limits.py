"""What a tenant may use: requests and tokens a minute, requests at a time. Pure; time is passed in.

Asked by the door for every request of a tenant that has limits. What is hard: how long an answer
gets is known only at its end, so its tokens are charged then, and a tenant that overdrew waits.
"""

from dataclasses import dataclass

MINUTE_S = 60.0
LEAST_S = 1e-6
"""Less is no wait: sums of times are not exact."""


class Bucket:
    """An allowance that fills evenly; a minute's worth may be used at once.

    It is known by when it is full again (the generic cell rate algorithm, ITU-T I.371).
    """

    __slots__ = ("_full_at", "_per_minute")

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_minute = per_minute
        self._full_at = now

    def look(self) -> None:
        """Learn what others have used that share it: before it is asked, or used unasked."""

    def find_wait_s(self, amount: float, now: float) -> float:
        """Seconds until so much may be used; 0: now. More than a minute's worth needs it full."""
        needed_s = min(amount / self._per_minute, 1.0) * MINUTE_S
        wait_s = self._full_at - now + needed_s - MINUTE_S
        return wait_s if wait_s > LEAST_S else 0.0

    def use(self, amount: float, now: float) -> None:
        """Charge so much, also what is not there."""
        self._full_at = max(self._full_at, now) + amount / self._per_minute * MINUTE_S

    def resize(self, per_minute: float) -> None:
        """Another allowance from now on, of which the same share is left."""
        self._per_minute = per_minute


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a tenant's request is not taken now."""

    reason: str
    """For metrics and as the error's code."""
    message: str
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """0: without limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Of prompts and answers."""
    max_concurrent: int = 0
    """Requests that wait or run."""


class Account:
    """What a tenant has used."""

    __slots__ = ("_limits", "_requests", "_tokens", "running")

    def __init__(self, limits: Limits, now: float) -> None:
        self.running = 0
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._limits = limits
        self.change(limits, now)

    def change(self, limits: Limits, now: float) -> None:
        """Other limits from now on."""
        self._limits = limits
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        self._requests = self._resize(self._requests, requests, now, of_tokens=False)
        self._tokens = self._resize(self._tokens, tokens, now, of_tokens=True)

    def enter(self, prompt_tokens: int, now: float) -> Refusal | None:
        """Take a request in; a refusal changes nothing."""
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
        """A request that was taken in has ended with so many tokens made."""
        self.running -= 1
        if self._tokens is not None:
            self._tokens.look()
            self._tokens.use(output_tokens, now)

    def count_running(self) -> int:
        """Requests that wait or run."""
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
