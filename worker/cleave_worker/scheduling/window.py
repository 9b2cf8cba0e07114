"""Which part of a queue of prompts is in order already (TetriInfer's scheduled queue).

Used by the emulated engine's queue and by vLLM's. What is hard: whoever is in a sorted batch stays
before all that came later, also when others leave the batch or are put back before it.
"""

from collections import deque
from collections.abc import Callable, Collection
from itertools import islice
from typing import Generic, TypeVar

from cleave.policy.ordering import Order, sort_prompts

T = TypeVar("T")


class Window(Generic[T]):
    """The sorted head of a queue that somebody else owns and tells of its changes."""

    def __init__(self, queue: deque[T], count_tokens: Callable[[T], int]) -> None:
        """`count_tokens`: what of a prompt is to be computed."""
        self._queue = queue
        self._count_tokens = count_tokens
        self._order = Order.FCFS
        self._batch = 1
        self._size = 0

    def follow(self, order: Order, batch: int) -> None:
        """From now on in this order; what was sorted is sorted anew."""
        self._order, self._batch, self._size = order, batch, 0

    def sort(self) -> None:
        """Sort the next batch when the last one is through. Call before looking at the first."""
        # A queue may call itself empty that is not: its length tells.
        count = min(self._batch, len(self._queue))
        if self._order is Order.FCFS or self._size or not count:
            return
        prompts = [self._queue.popleft() for _ in range(count)]
        places = list(range(count))
        sort_prompts(places, [self._count_tokens(prompt) for prompt in prompts], self._order)
        self._queue.extendleft(prompts[place] for place in reversed(places))
        self._size = count

    def took(self) -> None:
        """The first was taken out."""
        self._size = max(self._size - 1, 0)

    def put_back(self, count: int = 1) -> None:
        """So many were put before all others."""
        self._size += count

    def leave(self, prompts: Collection[T]) -> None:
        """These are about to be taken out, wherever they are."""
        self._size -= sum(prompt in prompts for prompt in islice(self._queue, self._size))
