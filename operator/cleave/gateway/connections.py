"""The open connections of one kind: how many there may be, and which is closed for a new one.

Clients of each port and TLS handshakes register here. When there are too many, an idle one is
closed rather than the new one refused: of the address that has most, the one that has been idle
longest. So one machine cannot keep the others out, and while there is room an address may have any
number, as a load balancer or NAT does. What is hard: looking at sixteen thousand connections
takes milliseconds, so one look finds the next few hundred to be closed.
"""

import heapq
import logging
import math
import socket
from collections import Counter
from collections.abc import Callable
from typing import Protocol

log = logging.getLogger(__name__)

LOOKED_AT_FOR_ONE = 64
"""Connections: so many are looked at for each that is found, or it waits until LOOK_S is over."""
LOOK_S = 0.1
"""Between two looks when too few could be closed."""
WARN_S = 60.0


class Connection(Protocol):
    """What counts as one."""

    def idle_since(self) -> float:
        """In the clock's seconds; infinite while a request is being answered."""

    def drop(self) -> None:
        """Close at once."""


class Connections:
    """Those of one kind, in one process."""

    def __init__(self, kind: str, limit: int, clock: Callable[[], float]) -> None:
        """`kind`: what the log calls them; `limit`: most connections."""
        self._kind = kind
        self._limit = limit
        self._found_at_once = limit // LOOKED_AT_FOR_ONE + 1
        self._clock = clock
        self._open: dict[Connection, str] = {}
        """With the addresses they come from."""
        self._counts: Counter[str] = Counter()
        """By address."""
        self._found: list[tuple[float, Connection]] = []
        """To be closed next, the last one first, if they are still idle since then."""
        self._look_at = self._warn_at = -math.inf

    def __len__(self) -> int:
        return len(self._open)

    def admit(self, connection: Connection, peer: object) -> bool:
        """Count a new connection; False: there is no room and none can be made.

        `peer`: the socket's peer name, as transports tell it.
        """
        if len(self._open) >= self._limit and not self._make_room():
            return False
        address = group(peer)
        self._open[connection] = address
        self._counts[address] += 1
        return True

    def leave(self, connection: Connection) -> None:
        """A connection has ended; once or more often."""
        address = self._open.pop(connection, None)
        if address is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def _make_room(self) -> bool:
        now = self._clock()
        if now >= self._warn_at:
            self._warn_at = now + WARN_S
            log.warning(
                "%d %s, as many as there may be: those that have been idle longest are closed",
                len(self._open),
                self._kind,
            )
        while True:
            while self._found:
                since, connection = self._found.pop()
                if connection in self._open and connection.idle_since() == since:
                    self.leave(connection)
                    connection.drop()
                    return True
            if now < self._look_at:
                return False
            self._found = self._find_idle()
            if len(self._found) < self._found_at_once:
                self._look_at = now + LOOK_S
            if not self._found:
                return False

    def _find_idle(self) -> list[tuple[float, Connection]]:
        counts = self._counts
        idle = [
            (-counts[address], since, place, connection)
            for place, (connection, address) in enumerate(self._open.items())
            if (since := connection.idle_since()) != math.inf
        ]
        first = heapq.nsmallest(self._found_at_once, idle)
        return [(since, connection) for _, since, _, connection in reversed(first)]


def group(peer: object) -> str:
    """The address that a peer counts by: of IPv6 the network of 64 bits, which one machine has."""
    if not isinstance(peer, tuple) or not peer:
        return ""
    address = str(peer[0])
    if ":" not in address:
        return address
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    if packed.startswith(b"\0" * 10 + b"\xff\xff"):
        return socket.inet_ntoa(packed[12:])
    return packed[:8].hex()
