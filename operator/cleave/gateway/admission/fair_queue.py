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


class QueueEntry(Generic[Item]):
    """A queued request."""

    __slots__ = ("cost", "deadline", "finish_tag", "item", "tenant")

    def __init__(self, item: Item, tenant: str, cost: float, deadline: float) -> None:
        self.item: Item | None = item
        """None: it has left the queue."""
        self.tenant = tenant
        self.cost = cost
        self.deadline = deadline
        """Seconds; the time at which it has waited too long."""
        self.finish_tag = 0.0


class FairQueue(Generic[Item]):
    """Queued requests of all tenants."""

    def __init__(self) -> None:
        self._heaps: dict[int, list[tuple[float, int, QueueEntry[Item]]]] = {}
        self._waiting_by_tenant: dict[str, int] = {}
        self._finish_tags: dict[str, float] = {}
        self._virtual_time = 0.0
        """Virtual time: the start tag of the request that was served last."""
        self._sequence = self._size = 0
        self.total_cost = 0.0
        """Sum over all queued requests."""

    def __len__(self) -> int:
        return self._size

    def count(self, tenant: str) -> int:
        """How many requests of a tenant are queued."""
        return self._waiting_by_tenant.get(tenant, 0)

    def push(
        self,
        item: Item,
        tenant: str,
        cost: float,
        *,
        deadline: float,
        weight: float = 1.0,
        priority: int = 0,
    ) -> QueueEntry[Item]:
        """Queue a request; higher priorities are served before all lower ones."""
        entry = QueueEntry(item, tenant, cost, deadline)
        start = max(self._virtual_time, self._finish_tags.get(tenant, 0.0))
        entry.finish_tag = start + cost / weight
        self._finish_tags[tenant] = entry.finish_tag
        self._sequence += 1
        heapq.heappush(self._heaps.setdefault(priority, []), (start, self._sequence, entry))
        self._waiting_by_tenant[tenant] = self._waiting_by_tenant.get(tenant, 0) + 1
        self._size += 1
        self.total_cost += cost
        return entry

    def pop(self) -> Item | None:
        """The next request; None when the queue is empty."""
        for priority in sorted(self._heaps, reverse=True):
            heap = self._heaps[priority]
            while heap:
                start, _, entry = heapq.heappop(heap)
                if entry.item is not None:
                    self._virtual_time = max(self._virtual_time, start)
                    item = entry.item
                    self.remove(entry)
                    return item
            del self._heaps[priority]
        return None

    def remove(self, entry: QueueEntry[Item]) -> None:
        """Remove a request; removing it again does nothing."""
        if entry.item is None:
            return
        entry.item = None
        self._size -= 1
        self.total_cost -= entry.cost
        remaining = self._waiting_by_tenant[entry.tenant] - 1
        if remaining:
            self._waiting_by_tenant[entry.tenant] = remaining
            return
        del self._waiting_by_tenant[entry.tenant]
        if not self._waiting_by_tenant:
            # The queue is empty, so no tenant has an advantage to compensate.
            self._heaps.clear()
            self._finish_tags.clear()
            self._virtual_time = self.total_cost = 0.0

    def list_expired(self, now: float) -> list[Item]:
        """Requests whose deadline has passed; they stay until removed."""
        return [
            entry.item
            for heap in self._heaps.values()
            for _, _, entry in heap
            if entry.item is not None and now > entry.deadline
        ]
