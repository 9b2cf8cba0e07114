"""The order in which waiting requests are served. Called by the simulator and by engines.

Plain loops over arrays or lists, the subset that numba compiles; standard library only. What is
hard: shortest or longest first starves other prompts, so only a batch of the oldest prompts is
sorted at a time. And under overload first come first served makes every request late, because each
one waits as long as the target allows before it is served.

Sources: TetriInfer, section 3.3.1 (PrefillSchedBatch). IN_TIME is Cleave's own.
"""

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class PrefillOrder(IntEnum):
    """First come first served; shortest or longest job first (TetriInfer, section 3.3.1); or first
    come first served among those that can still meet their TTFT target, then the others."""

    FCFS = 0
    SJF = 1
    LJF = 2
    IN_TIME = 3


HANDOFF_SHARE = 0.1
"""Share of the TTFT target that a prompt leaves for its transfer and its first decode iteration, if
it is computed on another instance than the one that decodes."""


def is_late(left_ms: float, own_ms: float) -> bool:
    """Whether a waiting request misses its TTFT target even if it is served now (IN_TIME).

    `left_ms`: until its target, negative after it; `own_ms`: predicted time from its start to its
    first token, 0 if unknown.
    """
    return own_ms > left_ms


def sort_prompts(
    requests: "NDArray[np.int64] | list[int]", tokens: "NDArray[np.int64] | list[int]", order: int
) -> None:
    """Sort `requests` and their prompt lengths `tokens` by `order`, in place and stably. Two arrays
    of equal length, oldest first: one PrefillSchedBatch."""
    if order not in (PrefillOrder.SJF, PrefillOrder.LJF):
        return
    sign = 1 if order == PrefillOrder.SJF else -1
    for end in range(1, len(requests)):
        request, length = requests[end], tokens[end]
        position = end
        while position > 0 and sign * tokens[position - 1] > sign * length:
            requests[position], tokens[position] = requests[position - 1], tokens[position - 1]
            position -= 1
        requests[position], tokens[position] = request, length
