"""How long an answer will be, learnt from those that ended. Called by the gateway's router.

What is hard: a prediction must not be biased, or the errors of a batch add up instead of cancelling
out; so it is the plain mean of the outputs that prompts of about this length had, fading slowly,
and for a request that has outrun it the mean of those that were at least as long.

Source: Aladdin, sections 2.3 and 4.3 (conditional average by prompt length; predicted again when
outrun). A classifier of length ranges (TetriInfer, section 3.3.2) fits the same `Predictor`.
"""

from typing import Protocol

_CLASSES = 24
"""Of prompt lengths, by powers of two."""
_OUTPUT_CLASSES = 20
"""Of output lengths, likewise."""
_FADING = 1 - 1 / 2000
"""About the last 2,000 answers of a class count."""
_LARGEST_GAIN = 1e9
_EVERY = 32
"""Answers between two looks at the means."""
_PRIOR = 8.0
"""Answers of a class that weigh as much as the mean of all."""


class Predictor(Protocol):
    """Foretells output lengths."""

    def predict(self, prompt_tokens: int, limit: int = 0) -> float:
        """Output tokens of a request; `limit`: its own, 0: none."""

    def predict_again(self, prompt_tokens: int, made: int, limit: int = 0) -> float:
        """Output tokens in all of one that has made `made` already."""

    def learn(self, prompt_tokens: int, output_tokens: int) -> None:
        """A request has ended by itself with that many output tokens."""


class ConditionalMean:
    """The mean output by prompt length, online; a few additions for each answer."""

    def __init__(self, first: float) -> None:
        """`first`: predicted before anything is learnt."""
        self._means = [first] * _CLASSES
        self._answers = 0
        self._all = _Outputs()
        self._classes = [_Outputs() for _ in range(_CLASSES)]

    def predict(self, prompt_tokens: int, limit: int = 0) -> float:
        """Output tokens of a request; `limit`: its own, 0: none."""
        length = prompt_tokens.bit_length()
        mean = self._means[length if length < _CLASSES else -1]
        return mean if limit == 0 or mean < limit else limit

    def predict_again(self, prompt_tokens: int, made: int, limit: int = 0) -> float:
        """Output tokens in all of one that has made `made` already."""
        outputs = self._classes[_classify(prompt_tokens, _CLASSES)]
        longer = outputs.find_mean_above(made) or self._all.find_mean_above(made) or 2.0 * made
        again = max(longer, made + 1.0)
        return min(again, max(limit, made + 1.0)) if limit else again

    def learn(self, prompt_tokens: int, output_tokens: int) -> None:
        """A request has ended by itself with that many output tokens."""
        self._all.add(output_tokens)
        self._classes[_classify(prompt_tokens, _CLASSES)].add(output_tokens)
        self._answers += 1
        # Means change slowly, once there have been some answers.
        if self._answers < _EVERY or self._answers % _EVERY == 0:
            overall = _PRIOR * self._all.tokens / self._all.weight
            self._means = [
                (outputs.tokens + overall) / (outputs.weight + _PRIOR) for outputs in self._classes
            ]


class _Outputs:
    """Fading sums of output lengths, by class of length.

    Instead of shrinking all that is old, what is new gets a larger weight each time; now and then
    everything is brought back to scale.
    """

    __slots__ = ("_gain", "_tokens", "_weights", "tokens", "weight")

    def __init__(self) -> None:
        self._gain = 1.0
        self._weights = [0.0] * _OUTPUT_CLASSES
        self._tokens = [0.0] * _OUTPUT_CLASSES
        self.weight = 0.0
        """Of all, in answers of now."""
        self.tokens = 0.0
        """Of all, likewise."""

    def add(self, tokens: int) -> None:
        gain = self._gain = self._gain / _FADING
        column = _classify(tokens, _OUTPUT_CLASSES)
        self._weights[column] += gain
        self._tokens[column] += gain * tokens
        self.weight = self.weight * _FADING + 1.0
        self.tokens = self.tokens * _FADING + tokens
        if gain > _LARGEST_GAIN:
            self._weights = [each / gain for each in self._weights]
            self._tokens = [each / gain for each in self._tokens]
            self._gain = 1.0

    def find_mean_above(self, made: int) -> float | None:
        """Mean of the classes above that of `made`; None: too few were so long."""
        start = _classify(made, _OUTPUT_CLASSES) + 1
        weight = sum(self._weights[start:])
        return sum(self._tokens[start:]) / weight if weight >= self._gain else None


def _classify(tokens: int, classes: int) -> int:
    """0: nothing, 1: 1 token, 2: 2 and 3, 3: 4 to 7, ..."""
    return min(tokens.bit_length(), classes - 1)
