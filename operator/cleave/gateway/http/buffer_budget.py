"""The memory that all clients of a gateway process may take for requests and answers. No I/O.

Client connections and attempts reserve what they buffer: requests that are being received, bodies
above a few KiB until their answer is complete, answers that are being collected, and answers that
clients do not read. What is hard: a client that never reads looks like a slow one. So unread
answers may take what is free, and when there is no room, the connections are closed that have been
blocked longest.
"""

from collections import OrderedDict
from typing import Protocol


class BlockedConnection(Protocol):
    """A connection whose client does not read."""

    def drop(self) -> None:
        """Close at once."""


class BufferBudget:
    """What is buffered now, in bytes."""

    def __init__(self, limit: int) -> None:
        self.used = 0
        self._limit = limit
        self._blocked: OrderedDict[BlockedConnection, int] = OrderedDict()
        """Unread bytes by connection, blocked longest first; they are part of `used`."""

    def reserve(self, count: int) -> bool:
        """Reserve so many bytes; False: there is no room, not even without unread answers."""
        if self.used + count > self._limit and not self._evict_blocked(count):
            return False
        self.used += count
        return True

    def release(self, count: int) -> None:
        """Free reserved bytes."""
        self.used -= count

    def add_blocked(self, connection: BlockedConnection, unread: int) -> None:
        """A client has stopped reading; `unread`: bytes of its answers in memory."""
        self.remove_blocked(connection)
        self._blocked[connection] = unread
        self.used += unread
        if self.used > self._limit:
            self._evict_blocked(0)

    def remove_blocked(self, connection: BlockedConnection) -> None:
        """A client reads again, or has gone; calls after the first do nothing."""
        self.used -= self._blocked.pop(connection, 0)

    def _evict_blocked(self, count: int) -> bool:
        """Close blocked connections until there is room for so many bytes; False: none is left."""
        while self.used + count > self._limit:
            if not self._blocked:
                return False
            connection, unread = self._blocked.popitem(last=False)
            self.used -= unread
            connection.drop()
        return True
