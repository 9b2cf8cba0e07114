"""The sorted part of a queue of prompts (TetriInfer's scheduled queue).

Used by the queues of the emulated engine and of vLLM. Prompts of a sorted batch stay before all
later ones, also when some leave the batch or are put back before it.
"""

from collections import deque
from collections.abc import Callable, Collection
from itertools import islice
from typing import Generic, TypeVar

from cleave.policy.prompt_order import PrefillOrder, sort_prompts

T = TypeVar("T")


class SortedWindow(Generic[T]):
    """The sorted head of a queue whose owner reports its changes."""

    def __init__(self, queue: deque[T], count_tokens: Callable[[T], int]) -> None:
        """`count_tokens`: tokens of a prompt that are to be computed."""
        self._queue = queue
        self._count_tokens = count_tokens
        self._order = PrefillOrder.FCFS
        self._batch = 1
        self._size = 0

    def set_order(self, order: PrefillOrder, batch: int) -> None:
        """Use this order from now on; sorted prompts are sorted again."""
        self._order, self._batch, self._size = order, batch, 0

    def sort(self) -> None:
        """Sort the next batch if the last one is used up; called before the first is read."""
        # The queue may report that it is empty, so its length is used.
        count = min(self._batch, len(self._queue))
        if self._order is PrefillOrder.FCFS or self._size or not count:
            return
        prompts = [self._queue.popleft() for _ in range(count)]
        indices = list(range(count))
        sort_prompts(indices, [self._count_tokens(prompt) for prompt in prompts], self._order)
        self._queue.extendleft(prompts[index] for index in reversed(indices))
        self._size = count

    def record_pop(self) -> None:
        """Record that the first prompt was removed."""
        self._size = max(self._size - 1, 0)

    def record_prepend(self, count: int = 1) -> None:
        """Record that `count` prompts were put before all others."""
        self._size += count

    def record_removal(self, prompts: Collection[T]) -> None:
        """Record that these prompts are about to be removed, at any position."""
        self._size -= sum(prompt in prompts for prompt in islice(self._queue, self._size))
