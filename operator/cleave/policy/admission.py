"""Whether a waiting request may join a batch without running out of KV later.

Called by the simulator and by engines. All amounts are tokens; remaining lengths are exact or
predicted. Plain arithmetic over arrays, the subset that numba compiles; standard library only.

Sources: TetriInfer, section 3.4 (reserve-static, reserve-dynamic); LightLLM's router, which admits
by the future peak of the batch's KV; Splitwise, section IV-B (limit of preemptions per request).
"""

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Admission(IntEnum):
    """When a waiting request joins the decode batch (TetriInfer, section 3.4)."""

    GREEDY = 0
    RESERVE_STATIC = 1
    RESERVE_DYNAMIC = 2


def may_join(
    admission: int, free: float, held: float, left: float, batch: int, shortest_left: float
) -> bool:
    """Whether a request with `held` KV tokens now and `left` more at its end may join.

    `free`: free KV tokens. `batch`: number of running requests, of which the first one to end has
    `shortest_left` tokens to go; without a batch that is the request itself.
    Greedy: its present tokens fit. Reserve-static: its final tokens fit now. Reserve-dynamic: the
    tokens of all requests still fit when the first of them ends.
    """
    if admission == Admission.RESERVE_STATIC:
        return held + left <= free
    if admission == Admission.RESERVE_DYNAMIC:
        steps = min(left, shortest_left) if batch else left
        return held + (batch + 1) * steps <= free
    return held <= free


def is_spared(preemptions: int, limit: int) -> bool:
    """Whether a request has reached its `limit` of preemptions (0: no limit).

    Engines preempt such a request only if all other requests have reached it, too.
    """
    return 0 < limit <= preemptions


def find_peak(held: "NDArray[np.int64]", left: "NDArray[np.int64]") -> int:
    """Peak of the sum of KV tokens of requests with `held` tokens now and `left` still to come.

    Each iteration adds a token to every request, and a request that ends frees all of its tokens;
    so the peak occurs just before some request ends. Both arrays have the same length; they are
    sorted in position by descending `left`.
    """
    gap = len(left) // 2
    while gap > 0:
        for end in range(gap, len(left)):
            tokens, rest = held[end], left[end]
            position = end
            while position >= gap and left[position - gap] < rest:
                held[position], left[position] = held[position - gap], left[position - gap]
                position -= gap
            held[position], left[position] = tokens, rest
        gap //= 2
    peak = 0
    total = 0
    for index in range(len(left)):
        total += held[index]
        peak = max(peak, total + (index + 1) * left[index])
    return peak
