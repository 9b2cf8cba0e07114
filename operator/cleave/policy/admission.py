"""Whether a waiting request may join a batch, so that its KV does not run out later.

Called by the simulator's instances and by engines. All amounts in tokens; lengths that are still to
come are known or predicted. Plain arithmetic over arrays, the subset that numba compiles; standard
library only.

Sources: TetriInfer, section 3.4 (reserve-static, reserve-dynamic); LightLLM's router, which admits
by the largest amount of KV that the batch will ever hold; Splitwise, section IV-B (how often one
request may be preempted).
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
    admission: int, free: float, held: float, left: float, batch: int, shortest_left: float
) -> bool:
    """Whether a request that would hold `held` tokens now and `left` more at its end may join.

    `free`: tokens that nobody holds. `batch` requests run, of which the first to end has
    `shortest_left` tokens left; without a batch that is the request itself.
    Greedy: what it holds now fits. Reserve-static: all that it will hold fits now.
    Reserve-dynamic: everybody's tokens still fit when the first of all ends.
    """
    if admission == Admission.RESERVE_STATIC:
        return held + left <= free
    if admission == Admission.RESERVE_DYNAMIC:
        steps = min(left, shortest_left) if batch else left
        return held + (batch + 1) * steps <= free
    return held <= free


def is_spared(preemptions: int, limit: int) -> bool:
    """Whether a request that was preempted so often is preempted only when nobody else can be.

    `limit`: how often each may be; 0: as often as it comes.
    """
    return 0 < limit <= preemptions


def find_peak(held: "Amounts", left: "Amounts") -> float:
    """The most tokens that requests holding `held` with `left` to come will ever hold together.

    Two arrays of equal length, sorted here by `left` in place.
    """
    sort_by_left(held, left)
    return find_sorted_peak(held, left)


def sort_by_left(held: "Amounts", left: "Amounts") -> None:
    """Bring requests in order, the most tokens to come first, in place."""
    gap = len(left) // 2
    while gap > 0:
        for end in range(gap, len(left)):
            tokens, rest = held[end], left[end]
            place = end
            while place >= gap and left[place - gap] < rest:
                held[place], left[place] = held[place - gap], left[place - gap]
                place -= gap
            held[place], left[place] = tokens, rest
        gap //= 2


def find_sorted_peak(held: "Amounts | Sequence[float]", left: "Amounts | Sequence[float]") -> float:
    """`find_peak` of requests that are sorted, the most tokens to come first.

    Each pass adds a token to every request, and one that ends frees all of its own; so the peak is
    just before some request ends.
    """
    peak = total = count = 0.0
    for tokens, rest in zip(held, left):  # noqa: B905 - numba knows no more
        total += tokens
        count += 1.0
        at_end = total + count * rest
        if at_end > peak:
            peak = at_end
    return peak
