"""The order in which waiting prompts are computed. Called by the simulator and by engines.

Plain loops over arrays or lists, the subset that numba compiles; standard library only. What is
hard: shortest or longest first starves other prompts, so only a batch of the oldest prompts is
sorted at a time.

Source: TetriInfer, section 3.3.1 (PrefillSchedBatch).
"""

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class PrefillOrder(IntEnum):
    """First come first served, or shortest or longest job first (TetriInfer, section 3.3.1)."""

    FCFS = 0
    SJF = 1
    LJF = 2


def sort_prompts(
    requests: "NDArray[np.int64] | list[int]", tokens: "NDArray[np.int64] | list[int]", order: int
) -> None:
    """Sort `requests` and their prompt lengths `tokens` by `order`, in place and stably. Two arrays
    of equal length, oldest first: one PrefillSchedBatch."""
    if order == PrefillOrder.FCFS:
        return
    sign = 1 if order == PrefillOrder.SJF else -1
    for end in range(1, len(requests)):
        request, length = requests[end], tokens[end]
        position = end
        while position > 0 and sign * tokens[position - 1] > sign * length:
            requests[position], tokens[position] = requests[position - 1], tokens[position - 1]
            position -= 1
        requests[position], tokens[position] = request, length
