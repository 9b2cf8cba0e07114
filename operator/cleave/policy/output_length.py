"""Predicts output lengths from completed requests. Called by the router, by engines and by the
simulator.

What is hard: a prediction must be unbiased, otherwise the errors of a batch add up instead of
cancelling out; so it is the slowly decaying mean output of prompts of about the same length. A
classifier, as in TetriInfer (section 3.3.2), gains nothing by default (`benchmarks/lengths`).

Source: Aladdin, section 2.3 (conditional average by prompt length).
"""

from typing import Protocol

_CLASSES = 24
"""Number of classes of prompt lengths, by powers of two."""
_DECAY = 1 - 1 / 2000
"""Decay: about the last 2,000 requests of a class count."""
_UPDATE_EVERY = 32
"""Requests between two updates of the means."""
_PRIOR_WEIGHT = 8.0
"""Weight of the overall mean in the mean of a class, in requests."""

_SHORTEST_STEP_MS = 1e-3
"""Lower bound of a decode iteration, so that progress stays finite."""


class LengthPredictor(Protocol):
    """Predicts output lengths."""

    def predict(self, prompt_tokens: int, limit: int = 0) -> float:
        """Output tokens of a request; `limit`: its limit of output tokens, 0: none."""

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        """Record a request that ended by itself with `output_tokens`."""


class ConditionalMean:
    """The mean output by prompt length, computed online with a few additions per request."""

    def __init__(self, first: float) -> None:
        """`first`: the prediction before the first completed request."""
        self._means = [first] * _CLASSES
        self._num_completed = 0
        self._overall = _DecayedOutputs()
        self._classes = [_DecayedOutputs() for _ in range(_CLASSES)]

    def predict(self, prompt_tokens: int, limit: int = 0) -> float:
        """Output tokens of a request; `limit`: its limit of output tokens, 0: none."""
        length = prompt_tokens.bit_length()
        mean = self._means[length if length < _CLASSES else -1]
        return mean if limit == 0 or mean < limit else limit

    def observe(self, prompt_tokens: int, output_tokens: int) -> None:
        """Record a request that ended by itself with `output_tokens`."""
        self._overall.add(output_tokens)
        self._classes[_find_class(prompt_tokens)].add(output_tokens)
        self._num_completed += 1
        # After the first requests the means change slowly.
        if self._num_completed < _UPDATE_EVERY or self._num_completed % _UPDATE_EVERY == 0:
            overall = _PRIOR_WEIGHT * self._overall.tokens / self._overall.weight
            self._means = [
                (outputs.tokens + overall) / (outputs.weight + _PRIOR_WEIGHT)
                for outputs in self._classes
            ]


def estimate_remaining(predicted: float, generated: float) -> float:
    """Predicted remaining output of a request that has generated `generated` tokens. A request
    beyond its prediction is assumed to need as much again: outputs have long tails."""
    return predicted - generated if generated < predicted else predicted


def guess_progress(output_tokens: float, decoding_ms: float, step_ms: float) -> tuple[float, float]:
    """(generated tokens, remaining tokens) of a request, estimated by a router that knows only how
    long it has decoded: `decoding_ms`, at `step_ms` per iteration."""
    generated = decoding_ms / max(step_ms, _SHORTEST_STEP_MS)
    return generated, estimate_remaining(output_tokens, generated)


class _DecayedOutputs:
    """Decaying sum of output lengths."""

    __slots__ = ("tokens", "weight")

    def __init__(self) -> None:
        self.weight = 0.0
        """Decayed number of requests."""
        self.tokens = 0.0
        """Decayed sum of their output tokens."""

    def add(self, tokens: int) -> None:
        self.weight = self.weight * _DECAY + 1.0
        self.tokens = self.tokens * _DECAY + tokens


def _find_class(tokens: int) -> int:
    """Class of a prompt length: 0: no token, 1: 1 token, 2: 2 and 3, 3: 4 to 7, ..."""
    return min(tokens.bit_length(), _CLASSES - 1)
