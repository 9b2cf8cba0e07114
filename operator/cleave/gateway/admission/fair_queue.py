"""Fair queueing among tenants. Pure; used by the admission controller, one queue per model.

Start-time fair queueing (Goyal, Vin, Cheng, 1996) within strict priorities: each tenant gets the
share of prompt tokens that its weight is of the weights of all waiting tenants, however many
requests it sends. What is hard: requests leave the queue in the middle, when their clients
disconnect or their deadline passes; they are only marked then, and skipped when they reach the
front.
"""

import heapq
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Place(Generic[Item]):
    """A queued request."""

    __slots__ = ("cost", "finish", "item", "tenant", "until")

    def __init__(self, item: Item, tenant: str, cost: float, deadline: float) -> None:
        self.item: Item | None = item
        """None: it has left the queue."""
        self.tenant = tenant
        self.cost = cost
        self.until = deadline
        """Seconds; the time at which it has waited too long."""
        self.finish = 0.0


class FairQueue(Generic[Item]):
    """Queued requests of all tenants."""

    def __init__(self) -> None:
        self._heaps: dict[int, list[tuple[float, int, Place[Item]]]] = {}
        self._waiting: dict[str, int] = {}
        self._finish: dict[str, float] = {}
        self._now = 0.0
        """Virtual time: the start tag of the request that was served last."""
        self._sequence = self._count = 0
        self.cost = 0.0
        """Sum over all queued requests."""

    def __len__(self) -> int:
        return self._count

    def count(self, tenant: str) -> int:
        """How many requests of a tenant are queued."""
        return self._waiting.get(tenant, 0)

    def push(
        self,
        item: Item,
        tenant: str,
        cost: float,
        *,
        until: float,
        weight: float = 1.0,
        priority: int = 0,
    ) -> Place[Item]:
        """Queue a request; higher priorities are served before all lower ones."""
        entry = Place(item, tenant, cost, until)
        start = max(self._now, self._finish.get(tenant, 0.0))
        entry.finish = start + cost / weight
        self._finish[tenant] = entry.finish
        self._sequence += 1
        heap = self._heaps.setdefault(priority, [])
        heapq.heappush(heap, (start, self._sequence, entry))
        self._waiting[tenant] = self._waiting.get(tenant, 0) + 1
        self._count += 1
        self.cost += cost
        return entry

    def pop(self) -> Item | None:
        """The next request; None when the queue is empty."""
        for priority in sorted(self._heaps, reverse=True):
            heap = self._heaps[priority]
            while heap:
                start, _, entry = heapq.heappop(heap)
                if entry.item is not None:
                    self._now = max(self._now, start)
                    item = entry.item
                    self.remove(entry)
                    return item
            del self._heaps[priority]
        return None

    def remove(self, entry: Place[Item]) -> None:
        """Remove a request; removing it again does nothing."""
        if entry.item is None:
            return
        entry.item = None
        self._count -= 1
        self.cost -= entry.cost
        remaining = self._waiting[entry.tenant] - 1
        if remaining:
            self._waiting[entry.tenant] = remaining
            return
        del self._waiting[entry.tenant]
        if not self._waiting:
            # The queue is empty, so no tenant has an advantage to compensate.
            self._heaps.clear()
            self._finish.clear()
            self._now = self.cost = 0.0

    def find_late(self, now: float) -> list[Item]:
        """Requests whose deadline has passed; they stay until removed."""
        return [
            entry.item
            for heap in self._heaps.values()
            for _, _, entry in heap
            if entry.item is not None and now > entry.until
        ]
