"""Whether a waiting request may join a batch without running out of KV later.

Called by the simulator and by engines. All amounts are tokens; remaining lengths are exact or
predicted. Plain arithmetic over arrays, the subset that numba compiles; standard library only.

Sources: TetriInfer, section 3.4 (reserve-static, reserve-dynamic); LightLLM's router, which admits
by the future peak of the batch's KV; Splitwise, section IV-B (limit of preemptions per request).
"""

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    Amounts = NDArray[np.int64] | NDArray[np.float64]


class Admission(IntEnum):
    """When a waiting request joins the decode batch (TetriInfer, section 3.4)."""

    GREEDY = 0
    RESERVE_STATIC = 1
    RESERVE_DYNAMIC = 2


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
