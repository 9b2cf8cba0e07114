"""Outstanding tokens of an instance, and a model of how fast its prefill queue advances.

Called by the router at every dispatch, release and load report. With several routers, load reports
are up to 100 ms old and contain the requests of all routers; a router's own accounting is exact but
contains only its own requests. Dispatch by the least sum of both stays within 1-15 % of an oracle;
dispatch by stale reports alone is far worse.
What is hard: a request that is in the report and in the accounting must count once.
"""

import math

INTERVAL_MS = 100
"""Interval of load reports to one of several routers."""
MAX_INTERVAL_MS = 500
"""Upper bound, far below the age at which a router considers an instance stale."""
SINGLE_ROUTER_FACTOR = 5
"""Factor on the interval of reports to a single router."""


def choose_report_interval_ms(requested_ms: int, routers: int) -> int:
    """Interval of reports to one of `routers` routers; 0: the client sends no requests.

    `requested_ms`: the interval that the client requested.

    A single router accounts for all requests itself and dispatches equally well without reports
    (benchmarks/dispatch); it needs them only for free blocks and to detect stalled engines.
    """
    if routers != 1:
        return requested_ms
    return max(requested_ms, min(SINGLE_ROUTER_FACTOR * requested_ms, MAX_INTERVAL_MS))


def estimate_pending(own: float, reported: float, own_at_report: float) -> float:
    """Tokens pending now: `own` plus those of other routers when the report was taken.

    The latter are the reported tokens minus the own outstanding tokens at that time, at least 0,
    because the engine makes progress on requests that the accounting holds in full until they end.
    """
    return own + max(reported - own_at_report, 0.0)


DEFAULT_TOKEN_MS = 0.1
"""Time per prompt token before the first observation."""
DECAY = 1 - 1 / 200
"""Decay per iteration: about the last 200 iterations count."""
SAME_ITERATION_SHARE = 0.1
"""A prompt completed in a smaller share of its expected time shared the previous iteration."""

ERROR_MARGIN = 1.5
"""Factor on the unexplained deviation in the upper estimate (1.5: benchmarks/dispatch)."""

RegressionSums = tuple[float, float, float, float, float, float, float, float, float]
"""Decayed sums for the regression. Totals: iterations, prompts, tokens; sum of 1 / tokens over
iterations; ms; sums of ms / tokens and ms^2 / tokens over iterations. Then tokens and ms of the
latest iteration."""
DEFAULT_SUMS: RegressionSums = (0.1, 0.1, 200.0, 0.000_05, 20.0, 0.01, 2.0, 0.0, 0.0)
"""Before the first observation: a tenth of a prompt of 2,000 tokens."""


def predict_end_ms(
    pending: float, prompts: float, since_ms: float, prompt_ms: float, token_ms: float, tie: float
) -> float:
    """When a queue of `pending` tokens in `prompts` prompts ends, in ms of a clock; empty: `tie`.

    `since_ms`: when its first prompt started, which is when the previous one completed. Comparing
    such times of one clock is equivalent to comparing remaining work, without reading the clock.
    """
    return tie if pending < 0.5 else since_ms + prompts * prompt_ms + pending * token_ms


def add_completion(sums: RegressionSums, tokens: float, ms: float) -> RegressionSums:
    """Include a prompt that completed `ms` after it became the first of its queue.

    Prompts of one iteration complete together, and all but the first seem to take no time. The
    regression is over iterations, so such a prompt is merged into the latest iteration:
    1. remove that iteration's summands from the sums; 2. add those of the merged iteration.
    """
    iterations, prompts, all_tokens, inverses, all_ms, rates, squares, last_tokens, last_ms = sums
    total, total_ms = tokens, ms
    if ms * all_tokens < SAME_ITERATION_SHARE * tokens * all_ms and last_tokens > 0.0:
        decay, started = 1.0, 0.0
        total, total_ms = last_tokens + tokens, last_ms + ms
        inverses -= 1.0 / last_tokens
        rates -= last_ms / last_tokens
        squares -= last_ms * last_ms / last_tokens
    else:
        decay, started = DECAY, 1.0
    return (
        iterations * decay + started,
        prompts * decay + 1.0,
        all_tokens * decay + tokens,
        inverses * decay + 1.0 / total,
        all_ms * decay + ms,
        rates * decay + total_ms / total,
        squares * decay + total_ms * total_ms / total,
        total,
        total_ms,
    )


def fit_prompt_times(sums: RegressionSums) -> tuple[float, float, float]:
    """(ms per prompt, ms per token, upper estimate of ms per token); none is below 0.

    1. Weighted least squares of iteration ms = fixed + ms per token * tokens. The variance of the
    errors is proportional to the tokens, so that short prompts determine the fixed part. One
    iteration that takes no time is added: if all prompts have the same length, the fixed part is 0.
    2. The upper estimate adds `ERROR_MARGIN` times the unexplained deviation, which comes mostly
    from wrong lengths. Nothing is known about the rest of an overdue prompt, so an estimate that is
    too late is better than one that is too early.
    """
    iterations, prompts, tokens, inverses, ms, rates, squares, _, _ = sums
    spread = inverses * tokens + iterations - iterations * iterations
    fixed_ms = 0.0
    # Sums that several processes wrote at the same time may be inconsistent.
    if spread > 0.0:
        fixed_ms = min(max((rates * tokens - ms * iterations) / spread, 0.0), ms / iterations)
    token_ms = (ms - fixed_ms * iterations) / tokens
    unexplained = squares - fixed_ms * rates - token_ms * ms
    unexplained -= fixed_ms * (rates - fixed_ms * inverses - token_ms * iterations)
    margin_ms = ERROR_MARGIN * math.sqrt(max(unexplained, 0.0) / tokens)
    return fixed_ms * iterations / prompts, token_ms, token_ms + min(margin_ms, ms / tokens)


def compute_mean_token_ms(prompt_ms: float, token_ms: float, prompts_per_token: float) -> float:
    """Time of a prompt token of the mean prompt, with its part of the fixed time. Unlike `token_ms`
    it is not 0 where times do not follow the tokens."""
    return prompts_per_token * prompt_ms + token_ms


class PrefillQueueModel:
    """How fast an instance computes prompts, and when it started the first one of its queue.

    What is hard: a partly computed prompt counts in full in the accounting, so dispatch by pending
    tokens is a third worse than by remaining work (benchmarks/dispatch). The time since the last
    completion shows how much of the first prompt is computed.
    """

    __slots__ = ("_sums", "head_started_ms", "prompt_ms", "token_ms", "upper_token_ms")

    def __init__(self) -> None:
        self.head_started_ms = 0.0
        self._sums: RegressionSums = DEFAULT_SUMS
        self.prompt_ms = 0.0
        """Fixed time per prompt."""
        self.token_ms = DEFAULT_TOKEN_MS
        """Time per prompt token."""
        self.upper_token_ms = DEFAULT_TOKEN_MS
        """Upper estimate of `token_ms`, by which queues are compared."""

    def observe_completion(self, tokens: float, now_ms: float, remote_tokens: float = 0.0) -> float:
        """Record that a prompt of `tokens` tokens completed and the next one starts; its ms.

        `remote_tokens`: pending tokens of other routers; with any, the time is not the prompt's.
        """
        ms = now_ms - self.head_started_ms
        self.head_started_ms = now_ms
        # A fully cached prompt gives no information about the speed.
        if tokens >= 1.0 and remote_tokens < 0.5:
            self._sums = add_completion(self._sums, tokens, ms)
            self.prompt_ms, self.token_ms, self.upper_token_ms = fit_prompt_times(self._sums)
        return ms

    def predict_ms(self, tokens: float, prompts: float) -> float:
        """Predicted ms to compute `tokens` tokens in `prompts` prompts."""
        return prompts * self.prompt_ms + tokens * self.token_ms

    def count_prompts(self, tokens: float) -> float:
        """Expected number of prompts with `tokens` tokens in total."""
        return tokens * self._sums[1] / self._sums[2]


class OutstandingTokens:
    """Outstanding tokens of one instance in one phase, own and those of other routers."""

    __slots__ = ("_remote", "own")

    def __init__(self) -> None:
        self.own = 0.0
        self._remote = 0.0

    @property
    def remote(self) -> float:
        """Tokens of routers that do not share this accounting, as of the latest report."""
        return self._remote

    @property
    def pending(self) -> float:
        """The estimate that dispatch compares."""
        return self.own + self._remote

    def add(self, tokens: float) -> None:
        """Add a request of this router."""
        self.own += tokens

    def remove(self, tokens: float) -> None:
        """Remove a request of this router, or its phase, that has ended."""
        self.own -= tokens

    def update_from_report(self, reported: float) -> float:
        """Include the tokens that the instance reports; returns the own outstanding tokens."""
        self._remote = estimate_pending(0.0, reported, self.own)
        return self.own
