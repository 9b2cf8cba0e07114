"""Predicts when a request would get its first token, to reject it if that is too late. Pure.

Fitted to finished requests: seconds to the first token as a linear function of the prompt tokens
computed until then, recent samples weighted more. What is hard: a prediction must not refuse what
could be served in time. So there is none before enough samples, and a request whose own prompt
takes longer than the target allows is never refused, since queueing is not what makes it late.
"""

SAMPLE_DECAY = 0.995
"""Weight of a sample after each further one: about the last 200 count."""
MIN_SAMPLES = 30.0
MIN_SPREAD = 1e-4
"""Of lengths, as variance over mean square; a smaller spread is only rounding."""


class FirstTokenModel:
    """Linear model of the seconds to the first token over prompt tokens."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        """Add a request: the prompt tokens before its first token, own ones included; seconds."""
        self._n = self._n * SAMPLE_DECAY + 1.0
        self._x = self._x * SAMPLE_DECAY + tokens
        self._y = self._y * SAMPLE_DECAY + seconds
        self._xx = self._xx * SAMPLE_DECAY + tokens * tokens
        self._xy = self._xy * SAMPLE_DECAY + tokens * seconds

    def predict_s(self, tokens: float) -> float | None:
        """Seconds to the first token; None before enough samples."""
        if self._n < MIN_SAMPLES:
            return None
        slope, mean = self._compute_slope(), self._y / self._n
        return max(0.0, mean + slope * (tokens - self._x / self._n))

    def compute_tokens_within(self, seconds: float) -> float | None:
        """Prompt tokens that are computed in so many seconds; None before enough samples."""
        slope = self._compute_slope() if self._n >= MIN_SAMPLES else 0.0
        return seconds / slope if slope > 0 else None

    def _compute_slope(self) -> float:
        """Seconds per token."""
        spread = self._n * self._xx - self._x * self._x
        is_significant = spread > MIN_SPREAD * self._n * self._xx
        slope = (self._n * self._xy - self._x * self._y) / spread if is_significant else 0.0
        if slope <= 0.0:
            # Similar lengths give no slope: assume that all of the time grows with the tokens.
            slope = self._y / self._x if self._x > 0 else 0.0
        return slope


def predict_ttft_excess_s(
    model: FirstTokenModel, backlog_tokens: float, prompt_tokens: float, target_s: float
) -> float:
    """Seconds by which a request misses its TTFT target, with `backlog_tokens` queued before it.
    0: it meets the target, would miss it even without a queue, or there are too few samples."""
    expected = model.predict_s(backlog_tokens + prompt_tokens)
    without_queue = model.predict_s(prompt_tokens)
    if expected is None or without_queue is None or without_queue > target_s:
        return 0.0
    return max(0.0, expected - target_s)
