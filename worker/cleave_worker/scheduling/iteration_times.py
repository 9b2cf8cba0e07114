"""Iteration times that an engine observes of itself, to predict those of other batches.

Used by the schedulers of the emulated engine and of vLLM. What is hard: vLLM schedules an iteration
while the one before it still runs, and an engine may be idle between two of them. So an iteration
takes from the end of the one before it, or from when it was scheduled, whichever is later.
"""

from cleave.policy.decayed_line import DecayedLine

MIN_SAMPLES = 8.0
"""Iterations vary little. An engine that meets an overload right after its start must know soon."""


class IterationTimes:
    """Two lines: ms of an iteration over its prompt tokens, and over all tokens whose KV is held if
    it has no prompt tokens."""

    def __init__(self, stages: int = 1) -> None:
        """`stages`: iterations in flight; a request takes part in one of so many."""
        self._stages = stages
        self._prompts = DecayedLine(MIN_SAMPLES)
        # Mostly what every iteration takes, also of a single request.
        self._decodes = DecayedLine(MIN_SAMPLES, is_proportional=False)
        self._last_end_s = 0.0

    def record(
        self, scheduled_s: float, end_s: float, prompt_tokens: int, used_tokens: int
    ) -> None:
        """Record an iteration: when it was scheduled and ended, on one clock."""
        ms = (end_s - max(scheduled_s, self._last_end_s)) * 1000 * self._stages
        self._last_end_s = end_s
        if prompt_tokens:
            self._prompts.observe(prompt_tokens, ms)
        else:
            self._decodes.observe(used_tokens, ms)

    def predict_prompt_ms(self, tokens: int, max_tokens: int) -> float:
        """ms to compute a prompt in iterations of up to `max_tokens`; 0: not known yet."""
        chunk = min(tokens, max_tokens)
        ms = self._prompts.predict(chunk)
        return ms * tokens / chunk if ms is not None and chunk else 0.0

    def predict_decode_ms(self, used_tokens: int) -> float:
        """ms of a decode iteration of an engine that holds so many tokens; 0: not known yet."""
        return self._decodes.predict(used_tokens) or 0.0
