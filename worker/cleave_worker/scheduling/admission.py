"""Admits waiting requests to the decode batch by the KV or the time that all of its requests need.

Used by the schedulers of the emulated engine and of vLLM. Predictions may be wrong, but a request
must never wait for more memory than the engine has. So a prediction is capped by the request's own
limit, which the engine has checked to fit.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from cleave.policy.admission import (
    Admission,
    allows_prompt,
    compute_slack_ms,
    limit_decode_ms,
    may_join,
)
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

    def keeps_tpot(
        self,
        decode_ms: float,
        alone_ms: float,
        prompt_ms: float,
        tpot_ms: float,
        late: bool,
        decoding: Iterable[tuple[RequestLengths, float]],
    ) -> bool:
        """Return whether a request may join `decoding` so that all meet `tpot_ms` (WITHIN_TPOT).

        `decode_ms`: of an iteration with it, without prompts; `alone_ms`: of one of it alone;
        `prompt_ms`: of its prompt and the decoding requests beside it, 0 if it is computed
        elsewhere; all 0 if not known yet.
        `late`: it has missed its TTFT target. `decoding`: each with ms since its first token, those
        with the least slack first.
        """
        if decode_ms > limit_decode_ms(alone_ms, tpot_ms, late):
            return False
        if not prompt_ms:
            return True
        limit_ms = limit_decode_ms(alone_ms, tpot_ms, False)
        for lengths, decoding_ms in decoding:
            generated, remaining = lengths.generated, self._predict_remaining(lengths)
            slack = compute_slack_ms(generated, remaining, decoding_ms, decode_ms, limit_ms)
            if not allows_prompt(slack, prompt_ms, tpot_ms):
                return False
        return True

    def _predict_remaining(self, request: RequestLengths) -> float:
        predicted = self._predictor.predict(request.prompt, request.limit)
        remaining = estimate_remaining(predicted, request.generated)
        return min(remaining, request.limit - request.generated)
