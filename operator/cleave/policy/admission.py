"""Whether a waiting request may join a batch without running out of KV or time later.

Called by the simulator and by engines. Amounts are tokens if no unit is named; remaining lengths
are exact or predicted. Plain arithmetic over arrays, the subset that numba compiles; standard
library only.

Sources: TetriInfer, section 3.4 (reserve-static, reserve-dynamic); LightLLM's router, which admits
by the future peak of the batch's KV; Splitwise, section IV-B (limit of preemptions per request);
Aladdin, section 4.2, constraints (b) and (d) (decoding requests keep their TPOT when one more joins
and while its prompt is computed), applied by the instance itself.
"""

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    Amounts = NDArray[np.int64] | NDArray[np.float64]


class Admission(IntEnum):
    """When a waiting request joins the decode batch: by KV (TetriInfer, section 3.4), or by the
    time of the batch's iterations (`keeps_tpot`)."""

    GREEDY = 0
    RESERVE_STATIC = 1
    RESERVE_DYNAMIC = 2
    WITHIN_TPOT = 3


TPOT_SHARE = 0.95
"""Share of the time between an iteration of one request alone and the TPOT target that WITHIN_TPOT
fills: contexts grow after requests have joined."""
LATE_TPOT_SHARE = 0.75
"""The same for requests that are late (`prompt_order.is_late`): the rest is for those that come and
can still be in time."""
RECOVERY_SHARE = 0.2
"""Share of the time that a request can still make up until its predicted end, and that one prompt
may use: others will come. With 0 prompts wait too long where TTFT targets are short, with 1
requests miss their TPOT under overload."""
GIVEN_UP_TOKENS = 10
"""A request that is so many tokens behind its TPOT target does not hold up prompts any more."""


def may_join(
    admission: int,
    free: float,
    used_tokens: float,
    remaining_tokens: float,
    batch: int,
    shortest_remaining_tokens: float,
) -> bool:
    """Whether a request with `used_tokens` KV tokens now and `remaining_tokens` more at its end may
    join.

    `free`: free KV tokens. `batch`: number of running requests; the first one to end has
    `shortest_remaining_tokens` tokens left (ignored if `batch` is 0).
    Greedy: its current tokens fit. Reserve-static: its final tokens fit now. Reserve-dynamic: the
    tokens of all requests still fit when the first of them ends.
    """
    if admission == Admission.RESERVE_STATIC:
        return used_tokens + remaining_tokens <= free
    if admission == Admission.RESERVE_DYNAMIC:
        steps = min(remaining_tokens, shortest_remaining_tokens) if batch else remaining_tokens
        return used_tokens + (batch + 1) * steps <= free
    return used_tokens <= free


def limit_decode_ms(alone_ms: float, tpot_ms: float, late: bool) -> float:
    """Longest iteration that a decode batch may have with a request that joins it (WITHIN_TPOT).

    `alone_ms`: of an iteration of this request only. A share of the target itself would leave an
    engine next to nothing where that takes most of it. `late`: it has missed its TTFT target.
    """
    share = LATE_TPOT_SHARE if late else TPOT_SHARE
    return alone_ms + share * max(tpot_ms - alone_ms, 0.0)


def compute_slack_ms(
    generated: float, remaining: float, decoding_ms: float, decode_ms: float, limit_ms: float
) -> float:
    """ms that a prompt may take from a decoding request without making it miss its TPOT target.

    `generated`, `remaining`: its output tokens so far and those predicted; `decoding_ms`: since its
    first token; `decode_ms`: of an iteration without prompts; `limit_ms`: from `limit_decode_ms`.
    """
    gain_ms = RECOVERY_SHARE * remaining * (limit_ms - decode_ms)
    return limit_ms * generated - decoding_ms + gain_ms


def allows_prompt(slack_ms: float, prompt_ms: float, tpot_ms: float) -> bool:
    """Whether a decoding request lets its instance compute a prompt for `prompt_ms`: it keeps its
    TPOT target, or has lost it (WITHIN_TPOT). `slack_ms`: from `compute_slack_ms`."""
    return prompt_ms <= slack_ms or slack_ms < -GIVEN_UP_TOKENS * tpot_ms


def is_protected(preemptions: int, limit: int) -> bool:
    """Whether a request has reached its `limit` of preemptions (0: no limit). Engines preempt such
    a request only if all other requests have reached it, too."""
    return 0 < limit <= preemptions


def find_peak(held: "Amounts", left: "Amounts") -> float:
    """Peak of the sum of KV tokens of requests with `held` tokens now and `left` still to come.
    Both arrays have the same length; they are sorted here by descending `left`, in place."""
    sort_by_left(held, left)
    return find_sorted_peak(held, left)


def sort_by_left(held: "Amounts", left: "Amounts") -> None:
    """Sort requests by descending `left`, in place."""
    gap = len(left) // 2
    while gap > 0:
        for end in range(gap, len(left)):
            tokens, remaining = held[end], left[end]
            position = end
            while position >= gap and left[position - gap] < remaining:
                held[position], left[position] = held[position - gap], left[position - gap]
                position -= gap
            held[position], left[position] = tokens, remaining
        gap //= 2


def find_sorted_peak(held: "Amounts | Sequence[float]", left: "Amounts | Sequence[float]") -> float:
    """`find_peak` of requests that are sorted by descending `left`.

    Each iteration adds a token to every request, and a request that ends frees all its tokens, so
    the peak is just before some request ends.
    """
    peak = total = count = 0.0
    for tokens, remaining in zip(held, left):  # noqa: B905 - numba does not support strict
        total += tokens
        count += 1.0
        at_end = total + count * remaining
        if at_end > peak:
            peak = at_end
    return peak
