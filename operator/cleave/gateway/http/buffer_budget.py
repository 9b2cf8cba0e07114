"""The memory that all clients of a gateway process may take. No I/O.

Their connections count, and what connections, attempts and streams buffer: requests that are being
received, bodies above a few KiB until their answer is complete, answers that are being collected,
what is kept of streams, and answers that clients do not read. What is hard: a client that never
reads looks like a slow one. So unread answers may take what is free; and when there is no room,
idle connections are closed first, then those that have been blocked longest.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Protocol

KEPT_SHARE = 0.5
"""Of the budget, for what is kept of streams: without it they cannot be continued by another
engine, while without the rest requests are refused."""
MAX_CLOSED = 128
"""Connections of a kind that are closed at a time to make room, 20 us each."""
CONNECTION_SHARE = 2
"""Connections have room for a half of what requests and answers may take, besides what these leave:
a gateway that is full of requests still answers others, with 503."""


class BlockedConnection(Protocol):
    """A connection whose client does not read."""

    def drop(self) -> None:
        """Close at once."""


def _close_none(is_full: bool) -> bool:
    del is_full
    return False


class BufferBudget:
    """What clients take now, in bytes."""

    def __init__(self, limit: int) -> None:
        """`limit`: of requests and answers; connections have room for half as much besides."""
        self.used = 0
        """Of requests and answers."""
        self.connection_bytes = 0
        """Of the connections themselves."""
        self.close_idle: Callable[[bool], bool] = _close_none
        """Closes an idle connection; returns whether there was one. Takes whether requests and
        answers alone are too much, so that only one with a part of a request is of use."""
        self._limit = limit
        self._kept = 0
        """What is kept of streams; a part of `used`."""
        self._total = limit + limit // CONNECTION_SHARE
        self._blocked: OrderedDict[BlockedConnection, int] = OrderedDict()
        """Unread bytes by connection, blocked longest first; they are part of `used`."""
        self._blocked_bytes = 0
        """Their sum."""

    def reserve(self, count: int) -> bool:
        """Reserve bytes of a request or an answer; False: there is no room, not even without idle
        connections and unread answers."""
        for _ in range(MAX_CLOSED):
            if self.has_room(count) or not self.close_idle(self.is_above_limit(count)):
                break
        if not self.evict_blocked(count):
            return False
        self.used += count
        return True

    def release(self, count: int) -> None:
        """Free reserved bytes."""
        self.used -= count

    def reserve_for_stream(self, count: int) -> bool:
        """Reserve so many bytes for what only a lost engine makes necessary; False: there is no
        room for that."""
        if self._kept + count > self._limit * KEPT_SHARE or not self.reserve(count):
            return False
        self._kept += count
        return True

    def release_for_stream(self, count: int) -> None:
        """Free bytes reserved by `reserve_for_stream`."""
        self._kept -= count
        self.used -= count

    def has_room(self, buffered: int, weight: int = 0) -> bool:
        """Whether so many bytes of requests and answers, and of connections, are free."""
        taken = self.used + self.connection_bytes
        return taken + buffered + weight <= self._total and not self.is_above_limit(buffered)

    def is_above_limit(self, buffered: int) -> bool:
        """Whether so many bytes are too many even without connections."""
        return self.used + buffered > self._limit

    def add_blocked(self, connection: BlockedConnection, unread: int) -> None:
        """A client has stopped reading; `unread`: bytes of its answers in memory."""
        self.remove_blocked(connection)
        self._blocked[connection] = unread
        self._blocked_bytes += unread
        self.used += unread
        self.evict_blocked(0)

    def remove_blocked(self, connection: BlockedConnection) -> None:
        """A client reads again, or has gone; calls after the first do nothing."""
        unread = self._blocked.pop(connection, 0)
        self._blocked_bytes -= unread
        self.used -= unread

    def evict_blocked(self, buffered: int, weight: int = 0) -> bool:
        """Close blocked connections until there is room for so many bytes; False: as many as are
        closed at a time do not make room, and none is closed if all would not."""
        if not self.has_room(buffered - self._blocked_bytes, weight):
            return False
        for _ in range(MAX_CLOSED):
            if self.has_room(buffered, weight):
                return True
            connection = next(iter(self._blocked))
            self.remove_blocked(connection)
            connection.drop()
        return self.has_room(buffered, weight)
