"""A line fitted to samples of which recent ones weigh more. Pure.

Used by the gateway for the time to the first token over prompt tokens, and by engines for the time
of an iteration over its tokens. What is hard: there must be no prediction before enough samples,
and samples at nearly equal places say nothing about a slope.
"""

SAMPLE_DECAY = 0.995
"""Weight of a sample after each further one: about the last 200 count."""
MIN_SAMPLES = 30.0
MIN_SPREAD = 1e-4
"""Of `x`, as variance over mean square; a smaller spread is only rounding."""


class DecayedLine:
    """A linear model of `y` >= 0 over `x` >= 0, by weighted least squares."""

    __slots__ = ("_is_proportional", "_min_samples", "_n", "_x", "_xx", "_xy", "_y")

    def __init__(self, min_samples: float = MIN_SAMPLES, *, is_proportional: bool = True) -> None:
        """`is_proportional`: where samples show no slope, all of `y` grows with `x`; else none."""
        self._min_samples = min_samples
        self._is_proportional = is_proportional
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, x: float, y: float) -> None:
        """Add a sample."""
        self._n = self._n * SAMPLE_DECAY + 1.0
        self._x = self._x * SAMPLE_DECAY + x
        self._y = self._y * SAMPLE_DECAY + y
        self._xx = self._xx * SAMPLE_DECAY + x * x
        self._xy = self._xy * SAMPLE_DECAY + x * y

    def predict(self, x: float) -> float | None:
        """`y` at `x`; None before enough samples."""
        if self._n < self._min_samples:
            return None
        slope, mean = self._compute_slope(), self._y / self._n
        return max(0.0, mean + slope * (x - self._x / self._n))

    def compute_growth(self, y: float) -> float | None:
        """By how much `x` may grow until `y` has grown by this; None before enough samples."""
        slope = self._compute_slope() if self._n >= self._min_samples else 0.0
        return y / slope if slope > 0 else None

    def _compute_slope(self) -> float:
        spread = self._n * self._xx - self._x * self._x
        is_significant = spread > MIN_SPREAD * self._n * self._xx
        slope = (self._n * self._xy - self._x * self._y) / spread if is_significant else 0.0
        if slope > 0.0:
            return slope
        return self._y / self._x if self._is_proportional and self._x > 0 else 0.0
