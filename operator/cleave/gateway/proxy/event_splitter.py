"""Divides an engine's bytes into complete events; the beginning of one waits for its end. No I/O.

Used by the relay when pieces do not end with an event. What is hard: an event may come in very many
pieces, so each byte is searched and copied once at any size. And the first event may list
every token id of a prompt, many times as long as any other event may be: these ids are taken out
while they arrive, so that nothing else has to read them.
"""

from cleave.gateway.failover.transcript import EVENT_SEPARATOR
from cleave.gateway.http.buffer_budget import BufferBudget
from cleave.gateway.proxy.event_template import PROMPT_IDS, are_ids

MAX_EVENT_BYTES = 512 << 10
"""Of one event without the ids of a prompt: it is held until it is complete, and then handled in
one go, 5 ms at most. Log-probabilities of 20 alternatives for 128 tokens take half of it."""
MAX_PROMPT_IDS_BYTES = 2 << 20
"""Of the ids of a prompt."""
SMALL_EVENT_BYTES = 1 << 10
"""Larger beginnings of events count toward the buffer budget."""
_SEPARATOR_BYTES = len(EVENT_SEPARATOR)
_LINE_END = 10
_OVERLAP = len(PROMPT_IDS) - 1


class EventTooLongError(Exception):
    """An event exceeds its limit, or there is no room for it."""


class EventSplitter:
    """The incomplete event of one stream."""

    __slots__ = (
        "_budget", "_in_ids", "_new_ids", "_reserved", "_searches_ids", "partial", "prompt_ids"
    )  # fmt: skip

    def __init__(self, budget: BufferBudget | None) -> None:
        self._budget = budget
        self._reserved = 0
        self.partial = bytearray()
        """The beginning of an event whose end has not arrived, without the ids of a prompt."""
        self._new_ids = bytearray()
        """Those of its ids that have come."""
        self._searches_ids = True
        """Whether they may still begin."""
        self._in_ids = False
        """Whether they go on in the next piece."""
        self.prompt_ids = b""
        """The ids of a prompt that were taken out of the first event that `take` returned."""

    def take(self, piece: bytes) -> bytes:
        """The complete events, with a piece of the stream. Raises EventTooLongError."""
        self.prompt_ids = b""
        if self._in_ids:
            piece = self._take_ids(piece)
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
            events, ids = bytes(partial), bytes(self._new_ids)
            self.clear()
            self.prompt_ids = ids
        if end < len(piece):
            self._store(piece[end:])
        return events

    def clear(self) -> None:
        """Forget the incomplete event."""
        self.partial, self._new_ids, self.prompt_ids = bytearray(), bytearray(), b""
        self._searches_ids, self._in_ids = True, False
        if self._reserved and self._budget is not None:
            self._budget.release(self._reserved)
        self._reserved = 0

    def _store(self, piece: bytes) -> None:
        partial = self.partial
        num_searched = max(len(partial) - _OVERLAP, 0)
        self._check_size(len(partial) + len(piece))
        self._reserve(len(piece))
        partial += piece
        if self._searches_ids and (at := partial.find(PROMPT_IDS, num_searched)) >= 0:
            at += len(PROMPT_IDS)
            ids = bytes(partial[at:])
            del partial[at:]
            self._searches_ids, self._in_ids = False, True
            partial += self._take_ids(ids)

    def _take_ids(self, piece: bytes) -> bytes:
        """Take ids from the beginning of a piece; what follows them. What is no list of ids as
        engines write it is a part of the event like any other."""
        end = piece.find(b"]")
        ids, rest = (piece, b"") if end < 0 else (piece[:end], piece[end:])
        self._in_ids = not rest
        if ids and not are_ids(ids):
            self._in_ids = False
            self._check_size(len(self.partial) + len(self._new_ids) + len(piece))
            piece, self._new_ids = bytes(self._new_ids) + piece, bytearray()
            return piece
        if len(self._new_ids) + len(ids) > MAX_PROMPT_IDS_BYTES:
            self.clear()
            raise EventTooLongError
        self._reserve(len(ids))
        self._new_ids += ids
        return rest

    def _check_size(self, size: int) -> None:
        if size > MAX_EVENT_BYTES:
            self.clear()
            raise EventTooLongError

    def _reserve(self, count: int) -> None:
        """Reserve room for so many bytes more, and for a copy of all once they are complete."""
        size = len(self.partial) + len(self._new_ids) + count
        if size <= SMALL_EVENT_BYTES or size <= self._reserved or self._budget is None:
            return
        growth = 2 * size - self._reserved
        if not self._budget.reserve(growth):
            self.clear()
            raise EventTooLongError
        self._reserved += growth
