"""What passes take, learnt from requests. Used by the router for the policy BestFit.

What is hard: a gateway sees requests, not passes; so an answer's mean time per token stands for the
passes of the batch that it was in, and a prompt's time at the head of its queue for its own pass.

Source: Aladdin, section 5.1: the scheduler keeps its performance models up to date from traces.
"""

from cleave.perf.aladdin import IterationTimes, TooFewSamplesError
from cleave.policy.packing import Packing

FEWEST_TOKENS = 8
"""Shorter answers say more about the network than about passes."""
_EVERY = 64
"""Samples between two fits."""


class Passes:
    """The model of one fleet's passes, and the promises to be kept with it."""

    def __init__(self, ttft_ms: float, tpot_ms: float) -> None:
        self._ttft_ms = ttft_ms
        self._tpot_ms = tpot_ms
        self._times = IterationTimes()
        self._samples = 0
        self.packing: Packing | None = None
        """None until enough has been seen."""

    def add_prompt(self, tokens: float, ms: float) -> None:
        """A prompt of that many tokens to compute was answered after `ms` at the head."""
        if tokens >= 1 and ms > 0:
            self._times.add_prefill(int(tokens), ms)
            self._count()

    def add_answer(self, tokens: int, ms: float, batch: int, context: float) -> None:
        """An answer took `ms` from its first token to its last, in a batch with such a context."""
        if tokens >= FEWEST_TOKENS and ms > 0:
            self._times.add_decode(batch, int(context), ms / (tokens - 1))
            self._count()

    def _count(self) -> None:
        self._samples += 1
        if self._samples % _EVERY:
            return
        try:
            coefficients = self._times.coefficients()
        except TooFewSamplesError:
            return
        # Without a slope nothing would ever be full.
        if coefficients.k1 > 0 and coefficients.k2 > 0:
            self.packing = Packing(coefficients, self._ttft_ms, self._tpot_ms)
