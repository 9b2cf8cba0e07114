"""A stream on its way from an engine to a client: bytes in, bytes out. Used by exchanges; no I/O.

The engine's bytes stay as they are; only the framing is this hop's own. What is hard: a stream that
breaks has to end so that every client notices, which takes an error event where the last one ended,
a proper last chunk, and no `[DONE]`.
"""

from cleave.gateway.errors import ApiError
from cleave.gateway.handoff import HandoffError, StreamGuard
from cleave.gateway.head import LAST_CHUNK, frame


class Relay:
    """One stream."""

    __slots__ = ("_chunked", "_guard", "_head", "began_at")

    def __init__(self, head: bytes, chunked: bool, now: float) -> None:
        self.began_at = now
        """Seconds, when the first byte came."""
        self._head = head
        self._chunked = chunked
        self._guard = StreamGuard()

    @property
    def events(self) -> int:
        """Complete events that have passed, `[DONE]` not counted: tokens, or nearly so."""
        return self._guard.events

    def pass_on(self, piece: bytes, complete: bool) -> bytes:
        """What to send for a piece of the engine's body. Raises HandoffError if it must not."""
        if piece:
            if not self._guard.accepts(piece):
                raise HandoffError("lies in the stream")
            if self._chunked:
                piece = frame(piece)
        if complete and self._chunked:
            piece += LAST_CHUNK
        return self._prepend_head(piece)

    def break_off(self, error: ApiError) -> bytes:
        """What to send when there is no more to come from the engine."""
        event = b"data: " + error.to_json() + b"\n\n"
        if not self._guard.between_events:
            event = b"\n\n" + event
        return self._prepend_head(frame(event) + LAST_CHUNK if self._chunked else event)

    def _prepend_head(self, data: bytes) -> bytes:
        head = self._head
        if not head:
            return data
        self._head = b""
        return head + data
