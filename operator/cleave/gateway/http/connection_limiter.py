"""Limits the open connections of one kind by number and memory; closes idle ones to make room.

Clients of each port and TLS handshakes register here with what they take of memory. When there are
too many, an idle connection is closed rather than the new one refused: one of the address that
takes most memory, the one that has been idle longest. So one machine cannot keep the others out:
nothing is closed for an address that takes more than the others do, but connections of its own;
only new connections and TLS handshakes of known clients go before all others. And while there is
room an address may have any number, as a load balancer or NAT does.

What is hard: this runs for each new connection while thousands of hostile ones arrive each second,
so it costs the same with sixteen thousand open connections as with ten. Connections do not report
that they become busy or idle. Each address has a queue in the order in which its connections were
last examined; one that has been active since moves to the end (CLOCK, second chance).
"""

import logging
import math
import socket
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from cleave.gateway.http.buffer_budget import MAX_CLOSED, BufferBudget
from cleave.gateway.http.ranked_addresses import RankedAddresses

log = logging.getLogger(__name__)

MAX_EXAMINED = 64
"""Connections that are examined for one that can be closed, 0.3 us each."""
MAX_EXAMINED_PER_ADDRESS = 16
STALLED_S = 5.0
"""A request of which a part came so long ago makes room for those of others."""
WARNING_INTERVAL_S = 60.0
UNIT_BYTES = 4 << 10
"""Addresses are compared in these units."""


class LimitedConnection(Protocol):
    """An open connection that can be closed to make room."""

    def get_idle_since(self) -> float:
        """In the clock's seconds; infinite while a request is being answered."""

    def is_receiving(self) -> bool:
        """Whether a part of a request has come."""

    def is_expected(self) -> bool:
        """Whether a first request is expected from it, so that it is not closed for others."""

    def drop(self) -> None:
        """Close at once."""


Queue = OrderedDict[LimitedConnection, float]


class _Member:
    """An open connection."""

    __slots__ = ("address", "buffered", "weight")

    def __init__(self, address: str, weight: int) -> None:
        self.address = address
        self.weight = weight
        """Bytes of the connection itself."""
        self.buffered = 0
        """Bytes of its requests."""


class ConnectionLimiter:
    """The open connections of one kind, in one process."""

    def __init__(
        self,
        kind: str,
        limit: int,
        clock: Callable[[], float],
        max_bytes: float = math.inf,
        budget: BufferBudget | None = None,
    ) -> None:
        """`kind`: what the log calls them; `limit`: most connections; `max_bytes`: most memory of
        all of them; `budget`: where it is reserved besides, None: it is reserved elsewhere."""
        self._kind = kind
        self._limit = limit
        self._clock = clock
        self._max_bytes = max_bytes
        self._budget = budget
        self._bytes = 0
        self._members: dict[LimitedConnection, _Member] = {}
        self._queues: dict[str, Queue] = {}
        """By address: its connections with their `get_idle_since` when they were last examined."""
        self._address_bytes: dict[str, int] = {}
        self._ranked = RankedAddresses()
        """By units of memory, negative: who takes most is first."""
        self._next_warning_at = -math.inf

    def __len__(self) -> int:
        return len(self._members)

    def admit(
        self, connection: LimitedConnection, address: str, weight: int, *, is_known: bool = False
    ) -> bool:
        """Register a new connection; False: there is no room and none can be made.
        `address`: as `get_address_group` returns it; `weight`: bytes of the connection itself;
        `is_known`: it goes before those of addresses that take less, too."""
        if not self._make_room(weight, 0, address, None, is_known=is_known):
            return False
        self._members[connection] = _Member(address, weight)
        queue = self._queues.setdefault(address, OrderedDict())
        queue[connection] = connection.get_idle_since()
        self._take(weight, 0, address)
        return True

    def update_weight(
        self, connection: LimitedConnection, weight: int, *, is_known: bool = False
    ) -> bool:
        """A connection itself takes another amount of memory; False: there is no room for it.
        `is_known`: as in `admit`."""
        member = self._members.get(connection)
        if member is None:
            return False
        growth = weight - member.weight
        if not self._make_room(growth, 0, member.address, connection, is_known=is_known):
            return False
        member.weight = weight
        self._take(growth, 0, member.address)
        return True

    def resize(self, connection: LimitedConnection, buffered: int) -> bool:
        """The requests of a connection take so many bytes now; False: there is no room for them."""
        member = self._members.get(connection)
        if member is None:
            return not buffered
        growth = buffered - member.buffered
        if not self._make_room(0, growth, member.address, connection):
            return False
        member.buffered = buffered
        self._take(0, growth, member.address)
        return True

    def remove(self, connection: LimitedConnection) -> None:
        """Remove a connection that has ended; calls after the first do nothing."""
        member = self._members.pop(connection, None)
        if member is None:
            return
        queue = self._queues[member.address]
        del queue[connection]
        if not queue:
            del self._queues[member.address]
        self._take(-member.weight, -member.buffered, member.address)

    def close_one(self, is_full: bool) -> bool:
        """Close an idle connection, for an answer; as `_close_idle`."""
        return self._close_idle(0, "", None, is_full)

    def _make_room(
        self,
        weight: int,
        buffered: int,
        address: str,
        connection: LimitedConnection | None,
        *,
        is_known: bool = False,
    ) -> bool:
        """Close idle connections until there is room for so many bytes; False: there is none.
        `connection`: the open one of `address` that grows; None: a new one."""
        budget = self._budget
        size = 0 if is_known else self._address_bytes.get(address, 0) + weight + buffered
        for _ in range(MAX_CLOSED):
            if self._has_room(weight, buffered, connection is None):
                return True
            is_full = budget is not None and budget.is_above_limit(buffered)
            if not self._close_idle(size, address, connection, is_full):
                break
        if budget is None or not budget.evict_blocked(buffered, weight):
            return False
        return self._has_room(weight, buffered, connection is None)

    def _has_room(self, weight: int, buffered: int, is_new: bool) -> bool:
        if weight > 0 and self._bytes + weight > self._max_bytes:
            return False
        if is_new and len(self._members) >= self._limit:
            return False
        return self._budget is None or self._budget.has_room(buffered, weight)

    def _take(self, weight: int, buffered: int, address: str) -> None:
        """Count bytes of a connection itself and of its requests."""
        self._bytes += weight
        if self._budget is not None:
            self._budget.connection_bytes += weight
            self._budget.used += buffered
        before = self._address_bytes.get(address, 0)
        after = self._address_bytes[address] = before + weight + buffered
        if address in self._queues:
            self._ranked.rank(address, -_count_units(after))
        else:
            del self._address_bytes[address]
            self._ranked.remove(address)

    def _close_idle(
        self, size: int, address: str, connection: LimitedConnection | None, is_full: bool
    ) -> bool:
        """Close one idle connection of an address that takes at least `size` bytes, so that
        `address` can take so many. False: none was idle among those that were examined.
        `connection`: the one that grows, None: a new one; `is_full`: only one with a part of a
        request that has been coming for long, as others free too little."""
        now = self._clock()
        latest = now - STALLED_S if is_full else now
        if now >= self._next_warning_at:
            self._next_warning_at = now + WARNING_INTERVAL_S
            log.warning(
                "%d %s take %d MiB, as much as there may be: those that have been idle longest are "
                "closed", len(self._members), self._kind, self._bytes >> 20,
            )  # fmt: skip
        examined = 0
        for other in self._list_larger(address, size):
            queue = self._queues[other]
            # Twice, because one that was busy is known to be idle only at the second look.
            looks = min(2 * len(queue), MAX_EXAMINED_PER_ADDRESS)
            # A request does not end another one of its address, as it may be a load balancer's.
            spared = connection if other == address else None
            idle = self._find_idle(queue, looks, latest, spared, is_full)
            if idle is not None:
                self.remove(idle)
                idle.drop()
                return True
            examined += looks
            if examined >= MAX_EXAMINED:
                break
        return False

    def _find_idle(
        self,
        queue: Queue,
        looks: int,
        latest: float,
        spared: LimitedConnection | None,
        is_full: bool,
    ) -> LimitedConnection | None:
        """The first connection that has been idle since it was last examined, and since `latest`;
        the others move back. `spared`: neither this one nor any that has a part of a request;
        `is_full`: only one that has."""
        for _ in range(looks):
            connection, known_since = next(iter(queue.items()))
            since = connection.get_idle_since()
            is_idle = since == known_since and since <= latest and not connection.is_expected()
            if is_idle and is_full:
                is_idle = self._members[connection].buffered > 0
            if is_idle and (
                spared is None or not (connection is spared or connection.is_receiving())
            ):
                return connection
            queue[connection] = since
            queue.move_to_end(connection)
        return None

    def _list_larger(self, address: str, size: int) -> Iterator[str]:
        """The addresses that take at least so many bytes, largest first, then this one. Of equal
        ones each is the first in turn."""
        yield from self._ranked.take_turns(-_count_units(size))
        if address in self._queues:
            yield address


def _count_units(size: int) -> int:
    return -(-size // UNIT_BYTES)


def get_address_group(peer: object) -> str:
    """The address under which a peer counts: for IPv6 the /64, which one machine may own.
    `peer`: the socket's peer name, as asyncio's transports give it."""
    if not isinstance(peer, tuple) or not peer:
        return ""
    address = str(peer[0])
    if ":" not in address:
        return address
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    if packed.startswith(b"\0" * 10 + b"\xff\xff"):
        return socket.inet_ntoa(packed[12:])
    return packed[:8].hex()
