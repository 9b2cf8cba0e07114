"""What a prompt costs on an instance, in ms: the predicted wait, and computing what is not cached.

Called by the simulator, which compiles it, in studies of dispatch by caches; routers do not count
caches so yet (decision 088). What is hard: a cached prefix must attract prompts, but not all of
them. In one unit both follow from the cost: while a queue takes longer than recomputing the prefix
elsewhere, the prompt goes elsewhere, and from then on the prefix is cached there, too.

Sources: Mooncake's Conductor adds up the queue and the prefill of what is not cached (FAST 2025,
cache-aware scheduling); Preble weighs reuse against load in one cost (ICLR 2025, E2). The wait here
is that of `policy.queue_model`.
"""

import math
from collections.abc import Sequence

from cleave.policy.dispatch import NONE, RESIDENT_WEIGHT, Scores

MAX_CANDIDATES = 16
"""Most instances that are compared for one prompt: the least loaded, and those that cache most."""


def predict_cost_ms(wait_ms: float, uncached_tokens: float, token_ms: float) -> float:
    """ms until a prompt is computed: the wait before it, and its `uncached_tokens` at `token_ms`
    each."""
    return wait_ms + max(uncached_tokens, 0.0) * token_ms


def predict_wait_ms(
    score: float, pending: float, is_time: bool, now_ms: float, token_ms: float
) -> float:
    """ms of work before a new prompt, from the score of ShortestWait.

    `is_time`: the score is when the queue ends, in ms of the clock that says `now_ms` (prefill
    instances); otherwise it is a sum of tokens (mixed instances), of which `pending` are prompt
    tokens that wait. The rest is resident: it lengthens the iterations that compute the prompt, and
    counts as much as in comparisons of cells (`RESIDENT_WEIGHT`).
    """
    if is_time:
        return max(score - now_ms, 0.0)
    return (pending + RESIDENT_WEIGHT * (score - pending)) * token_ms


def find_least_cost(
    slots: Sequence[int],
    cached: Sequence[float],
    token_ms: Sequence[float],
    scores: Scores | Sequence[float],
    pending: Scores | Sequence[float],
    prompt_tokens: float,
    is_time: bool,
    now_ms: float,
) -> int:
    """The slot at which the prompt costs least; of equal ones the first; NONE: all are closed.

    Candidates, of equal length: `slots`, first the one with the least score, then those that cache
    most; `cached`: how many of the `prompt_tokens` each has; `token_ms`: of each, ms per prompt
    token, `upper_token_ms` of its queue model: the lower estimate is 0 where times do not follow
    the tokens, so that everything there would seem to cost nothing. `scores`, `pending`: by slot,
    see `predict_wait_ms`; +inf: closed.
    """
    best = NONE
    lowest_ms = 0.0
    for at in range(len(slots)):
        slot = slots[at]
        if scores[slot] < math.inf:
            wait_ms = predict_wait_ms(scores[slot], pending[slot], is_time, now_ms, token_ms[at])
            cost_ms = predict_cost_ms(wait_ms, prompt_tokens - cached[at], token_ms[at])
            if best == NONE or cost_ms < lowest_ms:
                best, lowest_ms = slot, cost_ms
    return best
