"""The sorted parts of a queue of requests: TetriInfer's scheduled queue, or late ones at the end.

Used by the queues of the emulated engine and of vLLM. Prompts of a sorted batch stay before all
later ones, also when some leave the batch or are put back before it. With IN_TIME, requests that
are found late stay behind all others, in the order in which they were found.
"""

from collections import deque
from collections.abc import Callable, Collection
from itertools import islice
from typing import Generic, TypeVar

from cleave.policy.prompt_order import PrefillOrder, sort_prompts

T = TypeVar("T")


class SortedWindow(Generic[T]):
    """The order of a queue whose owner reports its changes."""

    def __init__(
        self,
        queue: deque[T],
        count_tokens: Callable[[T], int],
        is_late: Callable[[T], bool],
    ) -> None:
        """`count_tokens`: tokens of a prompt that are to be computed; `is_late`: whether a request
        misses its TTFT target even if it is served now."""
        self._queue = queue
        self._count_tokens = count_tokens
        self._is_late = is_late
        self._late: set[T] = set()
        """The requests at the end of the queue that were found late."""
        self._order = PrefillOrder.FCFS
        self._batch = 1
        self._size = 0

    def set_order(self, order: PrefillOrder, batch: int) -> None:
        """Use this order from now on; sorted prompts are sorted again."""
        self._order, self._batch, self._size = order, batch, 0
        if order is not PrefillOrder.IN_TIME:
            self._late.clear()

    def add(self, request: T) -> None:
        """Add a new request to the queue: behind all that are not late."""
        if self._late:
            self._queue.insert(len(self._queue) - len(self._late), request)
        else:
            self._queue.append(request)

    def sort(self) -> None:
        """Sort the next batch if the last one is used up, or defer late requests; called before the
        first is read."""
        if self._order is PrefillOrder.IN_TIME:
            while len(self._late) < len(self._queue) and self._is_late(self._queue[0]):
                self._late.add(self._queue[0])
                self._queue.rotate(-1)
            return
        # The queue may report that it is empty, so its length is used.
        count = min(self._batch, len(self._queue))
        if self._order is PrefillOrder.FCFS or self._size or not count:
            return
        prompts = [self._queue.popleft() for _ in range(count)]
        indices = list(range(count))
        sort_prompts(indices, [self._count_tokens(prompt) for prompt in prompts], self._order)
        self._queue.extendleft(prompts[index] for index in reversed(indices))
        self._size = count

    def is_deferred(self, request: T) -> bool:
        """Whether a request was found late."""
        return request in self._late

    def record_pop(self, request: T) -> None:
        """Record that the first prompt was removed."""
        self._size = max(self._size - 1, 0)
        self._late.discard(request)

    def record_prepend(self, count: int = 1) -> None:
        """Record that `count` prompts were put before all others."""
        self._size += count

    def record_removal(self, prompts: Collection[T]) -> None:
        """Record that these prompts are about to be removed, at any position."""
        self._size -= sum(prompt in prompts for prompt in islice(self._queue, self._size))
        self._late.difference_update(prompts)
