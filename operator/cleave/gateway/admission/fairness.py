"""Whose request is next when several tenants wait. Pure; used by the door, one queue per model.

Start-time fair queueing (Goyal, Vin, Cheng, 1996) inside strict priorities: each tenant gets the
share of prompt tokens that its weight is of the weights that wait, however many requests it sends.
What is hard: requests leave the queue in the middle, when their clients do or their time is over;
they are only marked, and skipped when their turn would come.
"""

import heapq
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Place(Generic[Item]):
    """A waiting request's place in the queue."""

    __slots__ = ("cost", "finish", "item", "tenant", "until")

    def __init__(self, item: Item, tenant: str, cost: float, until: float) -> None:
        self.item: Item | None = item
        """None: it has left."""
        self.tenant = tenant
        self.cost = cost
        self.until = until
        """Seconds; then it has waited too long."""
        self.finish = 0.0


class FairQueue(Generic[Item]):
    """Waiting requests of all tenants."""

    def __init__(self) -> None:
        self._heaps: dict[int, list[tuple[float, int, Place[Item]]]] = {}
        self._waiting: dict[str, int] = {}
        self._finish: dict[str, float] = {}
        self._now = 0.0
        """Virtual time: the start tag of the request served last."""
        self._sequence = self._count = 0
        self.cost = 0.0
        """Of all that wait."""

    def __len__(self) -> int:
        return self._count

    def count(self, tenant: str) -> int:
        """How many requests of a tenant wait."""
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
        """Let a request wait; higher priorities go before all others."""
        place = Place(item, tenant, cost, until)
        start = max(self._now, self._finish.get(tenant, 0.0))
        place.finish = start + cost / weight
        self._finish[tenant] = place.finish
        self._sequence += 1
        heap = self._heaps.setdefault(priority, [])
        heapq.heappush(heap, (start, self._sequence, place))
        self._waiting[tenant] = self._waiting.get(tenant, 0) + 1
        self._count += 1
        self.cost += cost
        return place

    def pop(self) -> Item | None:
        """The next request; None when nobody waits."""
        for priority in sorted(self._heaps, reverse=True):
            heap = self._heaps[priority]
            while heap:
                start, _, place = heapq.heappop(heap)
                if place.item is not None:
                    self._now = max(self._now, start)
                    item = place.item
                    self.remove(place)
                    return item
            del self._heaps[priority]
        return None

    def remove(self, place: Place[Item]) -> None:
        """It waits no more; doing so again changes nothing."""
        if place.item is None:
            return
        place.item = None
        self._count -= 1
        self.cost -= place.cost
        left = self._waiting[place.tenant] - 1
        if left:
            self._waiting[place.tenant] = left
            return
        del self._waiting[place.tenant]
        if not self._waiting:
            # Nobody waits: nobody has an advantage to make good.
            self._heaps.clear()
            self._finish.clear()
            self._now = self.cost = 0.0

    def find_late(self, now: float) -> list[Item]:
        """Requests whose time is over; they stay until removed."""
        return [
            place.item
            for heap in self._heaps.values()
            for _, _, place in heap
            if place.item is not None and now > place.until
        ]
