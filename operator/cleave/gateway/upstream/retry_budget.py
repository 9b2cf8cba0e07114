"""Limits how many requests of a model are retried at a time, as Envoy's retry budgets do. No I/O.

Used by the retry states of all requests of a gateway process. What is hard: when an engine is lost,
the other engines get all of its requests at once. Their prompts slow those engines down until they
look lost, too. So the retries of a model may be a share of its active requests, and further ones
wait. A retry counts from its start to its first byte, but not for long: an answer that is not
streamed has no byte before its end. An engine that did not receive a request costs nothing.

Source: Envoy, `RetryPolicy.RetryBudget` (`budget_percent`, `min_retry_concurrency`).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable

MIN_CONCURRENT_RETRIES = 10
"""Retries that may run at a time however few requests are active; Envoy: 3."""
MAX_RETRY_S = 5.0
"""How long a retry counts at most. With a share of 20 % all requests are retried within 25 s."""

COUNT_INTERVAL_S = 0.1
"""Active requests are counted at most once in this time, and only when one is to be retried:
counting each as it begins and ends would cost all of them."""


class RetryBudget:
    """The running retries of one gateway process, by model."""

    def __init__(self, share: float, list_models: Callable[[], Iterable[str]]) -> None:
        """`share`: of a model's active requests that may be retries, 0 to 1. `list_models`: the
        model of each active request."""
        self._share = share
        self._list_models = list_models
        self._active: Counter[str] = Counter()
        """Active requests by model, as of `_counted_at`."""
        self._counted_at = -math.inf
        self._started: dict[str, list[float]] = {}
        """By model: when each running retry started, in seconds, oldest first."""

    def acquire(self, model: str, now: float) -> bool:
        """Begin a retry; False: the budget is used up."""
        started = self._started.setdefault(model, [])
        while started and started[0] <= now - MAX_RETRY_S:
            del started[0]
        if now - self._counted_at >= COUNT_INTERVAL_S:
            self._counted_at = now
            self._active = Counter(self._list_models())
        if len(started) >= max(MIN_CONCURRENT_RETRIES, self._share * self._active[model]):
            return False
        started.append(now)
        return True

    def release(self, model: str, started_at: float) -> None:
        """The retry that began then has its first byte, or its request has ended."""
        started = self._started.get(model, [])
        if started_at in started:
            started.remove(started_at)
