"""Whether a waiting request may join those that decode, by what all of them are predicted to need.

Used by the emulated engine's scheduler and by vLLM's. What is hard: a prediction may be wrong, and
a request must never wait for more room than there is; so it counts for no more than the request's
own limit, which the engine has seen to fit.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cleave.policy.admission import Admission, may_join
from cleave.policy.lengths import ConditionalMean, Predictor, find_left


class Lengths(NamedTuple):
    """Of one request, in tokens."""

    prompt: int
    made: int
    """Output so far."""
    limit: int
    """Of its output."""


class Admitting:
    """Admission in one engine, which learns how long answers are."""

    def __init__(self, predictor: Predictor | None = None) -> None:
        """Without a predictor: the mean of answers seen here; before any, the request's limit."""
        self._predictor = predictor or ConditionalMean(math.inf)

    def learn(self, request: Lengths) -> None:
        """A request has ended by itself."""
        self._predictor.learn(request.prompt, request.made)

    def may_join(
        self,
        admission: Admission,
        free: int,
        request: Lengths,
        decoding: Callable[[], Iterable[Lengths]],
    ) -> bool:
        """Whether `request` may join those that are `decoding` while `free` tokens are nobody's."""
        if admission is Admission.GREEDY:
            # What it holds now fits, or it gets no blocks.
            return True
        lefts = [self._left(each) for each in decoding()]
        held = request.prompt + request.made
        # The last token is never written.
        left = self._left(request) - 1
        return may_join(admission, free, held, left, len(lefts), min(lefts, default=0.0))

    def _left(self, request: Lengths) -> float:
        predicted = self._predictor.predict(request.prompt, request.limit)
        return min(find_left(predicted, request.made), request.limit - request.made)
