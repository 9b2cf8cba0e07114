"""Admits waiting requests to the decode batch by the predicted KV demand of all of its requests.

Used by the schedulers of the emulated engine and of vLLM. What is hard: predictions may be wrong,
but a request must never wait for more memory than the engine has. So a prediction is capped by the
request's own limit, which the engine has checked to fit.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cleave.policy.admission import Admission, may_join
from cleave.policy.output_length import ConditionalMean, Predictor, find_left


class Lengths(NamedTuple):
    """Lengths of one request in tokens."""

    prompt: int
    made: int
    """Output tokens so far."""
    limit: int
    """Most output tokens."""


class Admitting:
    """Admission in one engine, with a predictor that learns from finished requests."""

    def __init__(self, predictor: Predictor | None = None) -> None:
        """Without a predictor: the mean output length so far; before any, the request's limit."""
        self._predictor = predictor or ConditionalMean(math.inf)

    def learn(self, request: Lengths) -> None:
        """Learn from a request that ended with a stop token."""
        self._predictor.learn(request.prompt, request.made)

    def may_join(
        self,
        admission: Admission,
        free: int,
        request: Lengths,
        decoding: Callable[[], Iterable[Lengths]],
    ) -> bool:
        """Return whether `request` may join `decoding`, given `free` tokens of KV memory."""
        if admission is Admission.GREEDY:
            # vLLM checks whether the request's present tokens fit.
            return True
        remaining = [self._left(other) for other in decoding()]
        current = request.prompt + request.made
        # The KV of the last token is never written.
        needed = self._left(request) - 1
        return may_join(
            admission, free, current, needed, len(remaining), min(remaining, default=0.0)
        )

    def _left(self, request: Lengths) -> float:
        predicted = self._predictor.predict(request.prompt, request.limit)
        return min(find_left(predicted, request.made), request.limit - request.made)
