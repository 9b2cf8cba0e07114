"""Admits waiting requests to the decode batch by the predicted KV demand of all of its requests.

Used by the schedulers of the emulated engine and of vLLM. Predictions may be wrong, but a request
must never wait for more memory than the engine has. So a prediction is capped by the request's own
limit, which the engine has checked to fit.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cleave.policy.admission import Admission, may_join
from cleave.policy.output_length import ConditionalMean, LengthPredictor, estimate_remaining


class RequestLengths(NamedTuple):
    """Lengths of one request in tokens."""

    prompt: int
    generated: int
    """Output tokens so far."""
    limit: int
    """Most output tokens."""


class EngineAdmission:
    """Admission in one engine, with a predictor that learns from finished requests."""

    def __init__(self, predictor: LengthPredictor | None = None) -> None:
        """Without a predictor: the mean output length so far; before any, the request's limit."""
        self._predictor = predictor or ConditionalMean(math.inf)

    def learn(self, request: RequestLengths) -> None:
        """Learn from a request that ended with a stop token."""
        self._predictor.observe(request.prompt, request.generated)

    def may_join(
        self,
        admission: Admission,
        free: int,
        request: RequestLengths,
        decoding: Callable[[], Iterable[RequestLengths]],
    ) -> bool:
        """Return whether `request` may join `decoding`, given `free` tokens of KV memory."""
        if admission is Admission.GREEDY:
            # vLLM checks whether the request's present tokens fit.
            return True
        remaining = [self._predict_remaining(other) for other in decoding()]
        current = request.prompt + request.generated
        # The KV of the last token is never written.
        needed = self._predict_remaining(request) - 1
        shortest = min(remaining, default=0.0)
        return may_join(admission, free, current, needed, len(remaining), shortest)

    def _predict_remaining(self, request: RequestLengths) -> float:
        predicted = self._predictor.predict(request.prompt, request.limit)
        remaining = estimate_remaining(predicted, request.generated)
        return min(remaining, request.limit - request.generated)
