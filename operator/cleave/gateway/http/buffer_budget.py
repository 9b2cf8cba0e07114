"""The memory that all clients of a gateway process may take for requests and answers. No I/O.

Client connections, attempts and streams reserve what they buffer: requests that are being
received, bodies above a few KiB until their answer is complete, answers that are being collected,
what is kept of streams, and answers that clients do not read. What is hard: a client that never
reads looks like a slow one. So unread answers may take what is free, and when there is no room, the
connections are closed that have been blocked longest.
"""

from collections import OrderedDict
from typing import Protocol

KEPT_SHARE = 0.5
"""Of the budget, for what is kept of streams: without it they cannot be continued by another
engine, while without the rest requests are refused."""


class BlockedConnection(Protocol):
    """A connection whose client does not read."""

    def drop(self) -> None:
        """Close at once."""


class BufferBudget:
    """What is buffered now, in bytes."""

    def __init__(self, limit: int) -> None:
        self.used = 0
        self._limit = limit
        self._kept = 0
        """What is kept of streams; a part of `used`."""
        self._blocked: OrderedDict[BlockedConnection, int] = OrderedDict()
        """Unread bytes by connection, blocked longest first; they are part of `used`."""
        self._blocked_bytes = 0
        """Their sum."""

    def reserve(self, count: int) -> bool:
        """Reserve so many bytes; False: there is no room, not even without unread answers."""
        if self.used + count > self._limit and not self._evict_blocked(count):
            return False
        self.used += count
        return True

    def release(self, count: int) -> None:
        """Free reserved bytes."""
        self.used -= count

    def reserve_for_stream(self, count: int) -> bool:
        """Reserve so many bytes for what only a lost engine makes necessary; False: there is no
        room for that."""
        is_over = self.used + count > self._limit
        if self._kept + count > self._limit * KEPT_SHARE or (
            is_over and not self._evict_blocked(count)
        ):
            return False
        self._kept += count
        self.used += count
        return True

    def release_for_stream(self, count: int) -> None:
        """Free bytes reserved by `reserve_for_stream`."""
        self._kept -= count
        self.used -= count

    def add_blocked(self, connection: BlockedConnection, unread: int) -> None:
        """A client has stopped reading; `unread`: bytes of its answers in memory."""
        self.remove_blocked(connection)
        self._blocked[connection] = unread
        self._blocked_bytes += unread
        self.used += unread
        if self.used > self._limit:
            self._evict_blocked(0)

    def remove_blocked(self, connection: BlockedConnection) -> None:
        """A client reads again, or has gone; calls after the first do nothing."""
        unread = self._blocked.pop(connection, 0)
        self._blocked_bytes -= unread
        self.used -= unread

    def _evict_blocked(self, count: int) -> bool:
        """Close blocked connections until there is room for so many bytes; False: all of them
        together would not make room, and none is closed."""
        if self.used - self._blocked_bytes + count > self._limit:
            return False
        while self.used + count > self._limit:
            connection = next(iter(self._blocked))
            self.remove_blocked(connection)
            connection.drop()
        return True
