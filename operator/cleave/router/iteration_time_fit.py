"""Iteration times estimated from requests. Used by the router for the policy BestFit.

What is hard: a gateway sees requests, not iterations; so the mean time per output token of a
request is taken as the iteration time of its batch, and the time of a prompt at the head of its
queue as the time of its own iteration. Prompts of one iteration end together, so the second one
takes next to no time and counts with the first.

Source: Aladdin, section 5.1: the scheduler keeps its performance models up to date from traces.
"""

from cleave.perf.published.aladdin import IterationTimeModel, TooFewSamplesError
from cleave.policy.best_fit import BestFitModel, exclude_prompts

MIN_OUTPUT_TOKENS = 8
"""Shorter outputs depend more on the network than on iteration times."""
MIN_OWN_SHARE = 0.5
"""Outputs that spent more of their time on prompts say little of decode iterations: the rest is the
small difference of two large, uncertain numbers."""
_SAME_ITERATION = 0.05
"""Prompts that end within this share of the time of the one before them count as of its iteration,
all of them together: a prompt that took very long hides only a few of those after it."""
_FIT_EVERY = 64
"""Number of samples between two fits."""


class PromptBatch:
    """The latest prompts of one instance that ended together."""

    __slots__ = ("first_ms", "ms", "tokens")

    def __init__(self) -> None:
        self.tokens = 0.0
        self.ms = 0.0
        self.first_ms = 0.0
        """Time of the first of them."""


class IterationTimeEstimator:
    """The fitted iteration times of one fleet, with its targets."""

    def __init__(self, ttft_ms: float, tpot_ms: float) -> None:
        self._ttft_ms = ttft_ms
        self._tpot_ms = tpot_ms
        self._model = IterationTimeModel()
        self._num_samples = 0
        self.best_fit: BestFitModel | None = None
        """Parameters of best fit; None until the samples suffice for a fit."""

    def add_prompt(self, batch: PromptBatch, tokens: float, ms: float) -> None:
        """Include a prompt of `tokens` uncached tokens that took `ms` at the head of its queue;
        `batch`: that of its instance, which counts when the next one ends."""
        if batch.ms + ms <= (1 + _SAME_ITERATION) * batch.first_ms:
            batch.tokens += tokens
            batch.ms += ms
            return
        if batch.tokens >= 1 and batch.ms > 0:
            self._model.add_prefill(int(batch.tokens), batch.ms)
            self._refit()
        batch.tokens, batch.ms, batch.first_ms = tokens, ms, ms

    def add_completion(
        self, tokens: int, ms: float, prompt_tokens: float, batch: float, context: float
    ) -> None:
        """Include an output of `tokens` tokens that took `ms` from its first to its last token,
        while its instance computed `prompt_tokens`. `batch`, `context`: the mean number of requests
        that decoded in this time, and of the sum of their contexts."""
        own_ms = ms
        if self.best_fit is not None:
            own_ms = exclude_prompts(ms, prompt_tokens, self.best_fit.coefficients.k1)
        if tokens >= MIN_OUTPUT_TOKENS and ms > 0 and own_ms >= MIN_OWN_SHARE * ms:
            self._model.add_decode(round(batch), int(context), own_ms / (tokens - 1))
            self._refit()

    def _refit(self) -> None:
        self._num_samples += 1
        if self._num_samples % _FIT_EVERY:
            return
        try:
            coefficients = self._model.solve()
        except TooFewSamplesError:
            return
        if coefficients.is_rising:
            self.best_fit = BestFitModel(coefficients, self._ttft_ms, self._tpot_ms)
