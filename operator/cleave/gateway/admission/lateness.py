"""When a request would get its first token, and whether it should still be taken. Pure.

Learnt from the requests that pass: seconds to the first token as a line over the prompt tokens that
are computed until then, newer ones counting more. What is hard: an estimate must not turn away what
could be served. So it says nothing until it has seen enough, and a request whose own prompt takes
longer than the target allows is never refused: waiting for others is not what makes it late.
"""

MEMORY = 0.995
"""What a sample still counts after the next one: about the last 200 matter."""
LEAST_SAMPLES = 30.0
LEAST_SPREAD = 1e-4
"""Of lengths, as their variance over their mean square; below it, only rounding differs."""


class FirstTokenModel:
    """Seconds to the first token over prompt tokens."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, tokens: float, seconds: float) -> None:
        """A request had so many prompt tokens before its first token, its own among them."""
        self._n = self._n * MEMORY + 1.0
        self._x = self._x * MEMORY + tokens
        self._y = self._y * MEMORY + seconds
        self._xx = self._xx * MEMORY + tokens * tokens
        self._xy = self._xy * MEMORY + tokens * seconds

    def predict_s(self, tokens: float) -> float | None:
        """Seconds to the first token; None while too little is known."""
        if self._n < LEAST_SAMPLES:
            return None
        mean = self._y / self._n
        return max(0.0, mean + self._find_slope() * (tokens - self._x / self._n))

    def find_tokens(self, seconds: float) -> float | None:
        """Prompt tokens that are computed in so much time; None while too little is known."""
        slope = self._find_slope() if self._n >= LEAST_SAMPLES else 0.0
        return seconds / slope if slope > 0 else None

    def _find_slope(self) -> float:
        """Seconds for each token."""
        spread = self._n * self._xx - self._x * self._x
        differ = spread > LEAST_SPREAD * self._n * self._xx
        slope = (self._n * self._xy - self._x * self._y) / spread if differ else 0.0
        if slope <= 0.0:
            # Lengths that hardly differ tell no slope: all of it grows with the tokens.
            slope = self._y / self._x if self._x > 0 else 0.0
        return slope


def find_excess_s(model: FirstTokenModel, ahead: float, own: float, target_s: float) -> float:
    """By how much a request of `own` prompt tokens with `ahead` before it will miss its target.

    0: it will not, it would even if nobody were before it, or too little is known.
    """
    expected, alone = model.predict_s(ahead + own), model.predict_s(own)
    if expected is None or alone is None or alone > target_s:
        return 0.0
    return max(0.0, expected - target_s)
