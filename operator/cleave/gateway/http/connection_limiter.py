"""Limits the open connections of one kind; closes an idle one to make room for a new one.

Clients of each port and TLS handshakes register here. When there are too many, an idle connection
is closed rather than the new one refused: one of the address that has the most connections, the one
that has been idle longest. So one machine cannot keep the others out, and while there is room an
address may have any number, as a load balancer or NAT does.

What is hard: this runs for each new connection while thousands of hostile ones arrive each second,
so it costs the same with sixteen thousand open connections as with ten. Connections do not report
that they become busy or idle. Each address has a queue in the order in which its connections were
last examined; one that has been active since moves to the end (CLOCK, second chance).
"""

import logging
import math
import socket
from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)

MAX_EXAMINED = 64
"""Connections that are examined for one that can be closed, 0.3 us each."""
MAX_EXAMINED_PER_ADDRESS = 16
WARNING_INTERVAL_S = 60.0


class LimitedConnection(Protocol):
    """An open connection that can be closed to make room."""

    def get_idle_since(self) -> float:
        """In the clock's seconds; infinite while a request is being answered."""

    def drop(self) -> None:
        """Close at once."""


Queue = OrderedDict[LimitedConnection, float]


class ConnectionLimiter:
    """The open connections of one kind, in one process."""

    def __init__(self, kind: str, limit: int, clock: Callable[[], float]) -> None:
        """`kind`: what the log calls them; `limit`: most connections."""
        self._kind = kind
        self._limit = limit
        self._clock = clock
        self._addresses: dict[LimitedConnection, str] = {}
        """The address of each open connection."""
        self._queues: dict[str, Queue] = {}
        """By address: its connections with their `get_idle_since` when they were last examined."""
        self._by_count: dict[int, OrderedDict[str, None]] = {}
        """The addresses that have so many connections."""
        self._next_warning_at = -math.inf

    def __len__(self) -> int:
        return len(self._addresses)

    def admit(self, connection: LimitedConnection, address: str) -> bool:
        """Register a new connection; False: there is no room and none can be made.
        `address`: as `get_address_group` returns it."""
        if len(self._addresses) >= self._limit and not self._evict_idle():
            return False
        self._addresses[connection] = address
        queue = self._queues.setdefault(address, OrderedDict())
        queue[connection] = connection.get_idle_since()
        self._update_address_count(address, len(queue) - 1, len(queue))
        return True

    def remove(self, connection: LimitedConnection) -> None:
        """Remove a connection that has ended; calls after the first do nothing."""
        address = self._addresses.pop(connection, None)
        if address is None:
            return
        queue = self._queues[address]
        del queue[connection]
        if not queue:
            del self._queues[address]
        self._update_address_count(address, len(queue) + 1, len(queue))

    def _update_address_count(self, address: str, before: int, after: int) -> None:
        if before:
            del self._by_count[before][address]
            if not self._by_count[before]:
                del self._by_count[before]
        if after:
            self._by_count.setdefault(after, OrderedDict())[address] = None

    def _evict_idle(self) -> bool:
        """Close one idle connection; False: none was idle among those that were examined."""
        now = self._clock()
        if now >= self._next_warning_at:
            self._next_warning_at = now + WARNING_INTERVAL_S
            message = "%d %s, as many as there may be: those that have been idle longest are closed"
            log.warning(message, len(self._addresses), self._kind)
        examined = 0
        for count in sorted(self._by_count, reverse=True):
            addresses = self._by_count[count]
            for _ in range(len(addresses)):
                address = next(iter(addresses))
                addresses.move_to_end(address)
                # Twice, because one that was busy is known to be idle only at the second visit.
                visits = min(2 * count, MAX_EXAMINED_PER_ADDRESS)
                connection = _find_idle(self._queues[address], visits)
                if connection is not None:
                    self.remove(connection)
                    connection.drop()
                    return True
                examined += visits
                if examined >= MAX_EXAMINED:
                    return False
        return False


def _find_idle(queue: Queue, visits: int) -> LimitedConnection | None:
    """The first connection that has been idle since it was last examined; the others move back."""
    for _ in range(visits):
        connection, known_since = next(iter(queue.items()))
        since = connection.get_idle_since()
        if since == known_since and since != math.inf:
            return connection
        queue[connection] = since
        queue.move_to_end(connection)
    return None


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
