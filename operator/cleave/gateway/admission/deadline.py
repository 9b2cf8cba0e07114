"""Predicts when a request would get its first token, to reject it if that is too late. Pure.

A line is fitted to finished requests: seconds to the first token over the prompt tokens computed
until then, own ones included. What is hard: a prediction must not refuse what could be served in
time. So there is none before enough samples, and a request whose own prompt takes longer than the
target allows is never refused, since queueing is not what makes it late.
"""

from cleave.policy.decayed_line import DecayedLine


def predict_ttft_excess_s(
    model: DecayedLine, backlog_tokens: float, prompt_tokens: float, target_s: float
) -> float:
    """Seconds by which a request misses its TTFT target, with `backlog_tokens` queued before it.
    0: it meets the target, would miss it even without a queue, or there are too few samples."""
    expected = model.predict(backlog_tokens + prompt_tokens)
    without_queue = model.predict(prompt_tokens)
    if expected is None or without_queue is None or without_queue > target_s:
        return 0.0
    return max(0.0, expected - target_s)
