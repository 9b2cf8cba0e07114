"""Which waiting prompt is computed next. Called by the simulator and by engines.

Plain loops over arrays or lists, the subset that numba compiles; standard library only. What is
hard: shortest or longest first starves the others, so only a batch of the oldest prompts is sorted
at a time.

Source: TetriInfer, section 3.3.1 (PrefillSchedBatch).
"""

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Order(IntEnum):
    """Which waiting prompt is next (TetriInfer, section 3.3.1)."""

    FCFS = 0
    SJF = 1
    LJF = 2


def sort_prompts(
    requests: "NDArray[np.int64] | list[int]", tokens: "NDArray[np.int64] | list[int]", order: int
) -> None:
    """Bring `requests` and their prompt lengths into `order`, in place; equal ones stay as is.

    Two arrays of equal length, oldest first: one PrefillSchedBatch.
    """
    if order == Order.FCFS:
        return
    sign = 1 if order == Order.SJF else -1
    for end in range(1, len(requests)):
        request, length = requests[end], tokens[end]
        place = end
        while place > 0 and sign * tokens[place - 1] > sign * length:
            requests[place], tokens[place] = requests[place - 1], tokens[place - 1]
            place -= 1
        requests[place], tokens[place] = request, length
