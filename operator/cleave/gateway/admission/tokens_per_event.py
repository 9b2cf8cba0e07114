"""How many tokens engines put into one event of a stream, learned from some streams. No I/O.

Used by the proxied requests of tenants with a token limit. What is hard: engines put several tokens
into one event with speculative decoding, or when they run late, but counting the tokens of every
stream would cost as much as a tenth of its request. So some streams are counted, and the others are
charged by the ratio.
"""

SAMPLE_EVERY = 128
"""One stream in so many is counted."""
_GAIN = 0.2
"""Weight of a counted stream in the moving mean."""


class TokensPerEvent:
    """The ratio by path and model."""

    def __init__(self) -> None:
        self._ratios: dict[tuple[bytes, str], float] = {}
        self._num_streams = 0

    def estimate(self, path: bytes, model: str, events: int) -> int | None:
        """Tokens of a stream with so many events; None: this one has to be counted."""
        self._num_streams += 1
        ratio = self._ratios.get((path, model))
        if ratio is None or self._num_streams % SAMPLE_EVERY == 0:
            return None
        return round(events * ratio)

    def observe(self, path: bytes, model: str, events: int, tokens: int) -> None:
        """A stream with so many events has so many tokens."""
        if events:
            key, ratio = (path, model), tokens / events
            mean = self._ratios.get(key, ratio)
            self._ratios[key] = mean + _GAIN * (ratio - mean)
