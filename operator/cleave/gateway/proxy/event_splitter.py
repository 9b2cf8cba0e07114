"""Divides an engine's bytes into complete events; the beginning of one waits for its end. No I/O.

Used by the relay when pieces do not end with an event. What is hard: an event may come in very many
pieces, so each byte is searched and copied once, whatever its size.
"""

from cleave.gateway.failover.transcript import EVENT_SEPARATOR
from cleave.gateway.http.buffer_budget import BufferBudget

MAX_EVENT_BYTES = 2 << 20
"""Of one event: it is held until it is complete, and then handled in one go, 5 ms at most."""
SMALL_EVENT_BYTES = 16 << 10
"""Larger beginnings of events count toward the buffer budget."""
_SEPARATOR_BYTES = len(EVENT_SEPARATOR)
_LINE_END = 10


class EventTooLongError(Exception):
    """An event exceeds its limit, or there is no room for it."""


class EventSplitter:
    """The incomplete event of one stream."""

    __slots__ = ("_budget", "_reserved", "partial")

    def __init__(self, budget: BufferBudget | None) -> None:
        self._budget = budget
        self._reserved = 0
        self.partial = bytearray()
        """The beginning of an event whose end has not arrived."""

    def take(self, piece: bytes) -> bytes:
        """The complete events, with a piece of the stream. Raises EventTooLongError."""
        partial = self.partial
        end = piece.rfind(EVENT_SEPARATOR) + _SEPARATOR_BYTES
        if end < _SEPARATOR_BYTES:
            # The separator itself may be cut.
            is_cut = bool(partial) and partial[-1] == _LINE_END
            end = 1 if is_cut and piece.startswith(b"\n") else 0
        if not end:
            self._store(piece)
            return b""
        if not partial:
            events = piece[:end]
        else:
            self._check_size(len(partial) + end)
            partial += piece[:end]
            events = bytes(partial)
            self.clear()
        if end < len(piece):
            self._store(piece[end:])
        return events

    def clear(self) -> None:
        """Forget the incomplete event."""
        self.partial = bytearray()
        if self._reserved and self._budget is not None:
            self._budget.release(self._reserved)
        self._reserved = 0

    def _store(self, piece: bytes) -> None:
        size = len(self.partial) + len(piece)
        self._check_size(size)
        if size > SMALL_EVENT_BYTES and size > self._reserved:
            # Twice the size: there is a copy of it once it is complete.
            growth = 2 * size - self._reserved
            if not self._reserve(growth):
                self.clear()
                raise EventTooLongError
        self.partial += piece

    def _check_size(self, size: int) -> None:
        if size > MAX_EVENT_BYTES:
            self.clear()
            raise EventTooLongError

    def _reserve(self, count: int) -> bool:
        if self._budget is not None and not self._budget.reserve(count):
            return False
        self._reserved += count
        return True
