"""Limits how many requests of a model are retried at a time, as Envoy's retry budgets do. No I/O.

Used by the retry states of all requests of a gateway process. What is hard: when an engine is lost,
the other engines get all of its requests at once. Their prompts slow those engines down until they
look lost, too. So the retries of a model may be a share of its active requests, and further ones
wait. A retry counts from its start to its first byte, but not for long: an answer that is not
streamed has no byte before its end. An engine that did not receive a request costs nothing.

Source: Envoy, `RetryPolicy.RetryBudget` (`budget_percent`, `min_retry_concurrency`).
"""

from collections import defaultdict

MIN_CONCURRENT_RETRIES = 10
"""Retries that may run at a time however few requests are active; Envoy: 3."""
MAX_RETRY_S = 5.0
"""How long a retry counts at most. With a share of 20 % all requests are retried within 25 s."""


class RetryBudget:
    """The active requests and running retries of one gateway process, by model."""

    def __init__(self, share: float) -> None:
        """`share`: of a model's active requests that may be retries, 0 to 1."""
        self.active: dict[str, int] = defaultdict(int)
        """Active requests by model, without zeros, because clients may send any name. Requests
        count themselves: a method would cost each of them more."""
        self._share = share
        self._started: dict[str, list[float]] = {}
        """By model: when each running retry started, in seconds, oldest first."""

    def acquire(self, model: str, now: float) -> bool:
        """Begin a retry; False: the budget is used up."""
        started = self._started.setdefault(model, [])
        while started and started[0] <= now - MAX_RETRY_S:
            del started[0]
        if len(started) >= max(MIN_CONCURRENT_RETRIES, self._share * self.active.get(model, 0)):
            return False
        started.append(now)
        return True

    def release(self, model: str, started_at: float) -> None:
        """The retry that began then has its first byte, or its request has ended."""
        started = self._started.get(model, [])
        if started_at in started:
            started.remove(started_at)
