"""Relays a server-sent event stream from an engine to a client: bytes in, bytes out. No I/O.

Used by exchanges. The engine's events are not changed; only the chunked framing is this hop's own.
What is hard: an engine may be lost at any byte and another one continue, so only complete events
are sent, and what was sent is kept in the cheapest form: as bytes, which are parsed only if an
engine is lost. A stream that ends in failure must end so that every client notices: with an error
event, a proper last chunk, and no `[DONE]`.
"""

from typing import Protocol

from cleave.gateway.failover.transcript import BORDER, DONE, Transcript
from cleave.gateway.http.errors import ApiError
from cleave.gateway.http.headers import LAST_CHUNK, frame
from cleave.gateway.upstream.kv_transfer_params import HandoffError, leaks_handoff
from cleave.gateway.upstream.stream_start import is_failure

KEPT_MASK = 1_023
"""Every 1,024 events the sent pieces are parsed and dropped, which bounds memory."""
MAX_EVENT_BYTES = 32 << 20

_EVENT_END = b"}\n\n"
_KEY = b'"kv_transfer_params"'
_FAILURE = b'data: {"error"'
_GIVEN_UP = b'"finish_reason":"abort"'
_NEWLINE = 10
_BORDER = BORDER
_BORDER_BYTES = len(BORDER)
_LISTED_SIZES = 1_024
_SIZES = [b"%x\r\n" % size for size in range(_LISTED_SIZES)]
"""First lines of chunks, formatted once for nearly all sizes that occur."""
_PROMPT_IDS = b'"prompt_token_ids":['


class StreamLostError(Exception):
    """The engine will not finish its stream; `data` is still to be sent.

    `str()` is the reason and continues `instance NAME ...`.
    """

    def __init__(self, data: bytes, reason: str) -> None:
        super().__init__(reason)
        self.data = data


class Splice(Protocol):
    """Rewrites another engine's events into the rest of this stream."""

    def turn(self, event: bytes) -> bytes:
        """Complete events for the client, or nothing; `event` is without the empty line after it.

        Raises SpliceError when it is not the rest of this stream.
        """


class Relay:
    """One stream to one client."""

    __slots__ = (
        "_chunked",
        "_head",
        "_kept",
        "_opaque",
        "_rest",
        "_shows_ids",
        "_splice",
        "_transcript",
        "began_at",
        "events",
        "numbered",
        "prompt_ids",
    )

    def __init__(
        self,
        head: bytes,
        chunked: bool,
        now: float,
        has_token_ids: bool = False,
        opaque: bool = False,
        return_token_ids: bool = False,
    ) -> None:
        """`has_token_ids`: the engine sends them; `return_token_ids`: the client requested them.

        `opaque`: not a completion, so the format of its events is unknown.
        """
        self.began_at = now
        """Seconds, when the first byte came."""
        self.events = 0
        """Events sent, `[DONE]` not counted: about one per token."""
        self.numbered = has_token_ids
        self.prompt_ids = b""
        """The prompt's token ids as the engine wrote them; empty if it did not."""
        self._head = head
        self._chunked = chunked
        self._opaque = opaque
        self._shows_ids = return_token_ids
        self._rest = b""
        """The beginning of an event whose end has not arrived."""
        self._kept: list[bytes] = []
        self._transcript: Transcript | None = None
        self._splice: Splice | None = None

    def pass_on(self, piece: bytes, complete: bool) -> bytes:
        """The bytes to send for a piece of the engine's body.

        Raises HandoffError if the piece contains a handoff, StreamLostError when the engine gives
        up, and SpliceError.
        """
        if self._rest or not piece.endswith(_BORDER):
            piece = self._cut(piece, complete)
        if self._splice is not None:
            piece = self._turn(piece)
        lost = ""
        if piece:
            if not self.events and self.numbered:
                piece = self._take_prompt_ids(piece)
            # Searching a piece is the most expensive step here. `in` first tries to read bytes as
            # an integer and `find` parses its arguments; each doubles the cost of `rpartition`,
            # which copies only what it finds. An integer (`_NEWLINE`) is found at once.
            if piece.rpartition(_KEY)[1] and leaks_handoff(piece):
                raise HandoffError("lies in the stream")
            if _NEWLINE not in piece[:-_BORDER_BYTES]:
                events = int(piece.endswith(_EVENT_END))
                failed = piece.startswith(_FAILURE)
            else:
                events = piece.count(_EVENT_END)
                failed = piece.find(_FAILURE) >= 0
            if (failed or (events and piece.rpartition(_GIVEN_UP)[1])) and not self._opaque:
                piece, lost = _cut_at_failure(piece)
                events = piece.count(_EVENT_END)
        if piece:
            self._kept.append(piece)
            self.events = num_events = self.events + events
            if num_events & KEPT_MASK < events:
                self._read_kept()
            if self._chunked:
                size = len(piece)
                line = _SIZES[size] if size < _LISTED_SIZES else b"%x\r\n" % size
                piece = b"%b%b\r\n" % (line, piece)
        if complete and not lost:
            if self._rest or not (self._opaque or self._ends_with_done()):
                lost = "ended its stream early"
            elif self._chunked:
                piece += LAST_CHUNK
        if self._head:
            piece = self._prepend_head(piece)
        if lost:
            raise StreamLostError(piece, lost)
        return piece

    def read(self) -> Transcript:
        """What the client has received so far, parsed."""
        self._read_kept()
        assert self._transcript is not None
        return self._transcript

    def splice(self, splice: Splice) -> None:
        """From now on the events come from another engine and are rewritten by `splice`."""
        self._splice = splice
        self._rest = b""

    def finish(self, events: bytes) -> bytes:
        """The end of the stream when only these events are missing."""
        return self._prepend_head(frame(events) + LAST_CHUNK if self._chunked else events)

    def break_off(self, error: ApiError) -> bytes:
        """The end of the stream when no engine can continue it."""
        event = b"data: " + error.to_json() + BORDER
        return self.finish(b"event: error\n" + event if self._opaque else event)

    def _cut(self, piece: bytes, complete: bool) -> bytes:
        """The complete events; an incomplete one waits for the next piece."""
        piece = self._rest + piece
        end = piece.rfind(BORDER) + len(BORDER)
        if end < len(BORDER):
            end = 0
        if complete and self._opaque:
            end = len(piece)
        self._rest = piece[end:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise StreamLostError(b"", "sent an event that is too long")
        return piece[:end]

    def _turn(self, events: bytes) -> bytes:
        splice = self._splice
        assert splice is not None
        return b"".join([splice.turn(event) for event in events.split(BORDER) if event])

    def _take_prompt_ids(self, events: bytes) -> bytes:
        """Remove the prompt's token ids, which vLLM sends once, in its first event.

        They are as long as the prompt, so they are removed before any search through the piece, and
        copied instead for a client that requested them.
        """
        start = events.find(_PROMPT_IDS) + len(_PROMPT_IDS) - 1
        end = events.find(b"]", start)
        if start < len(_PROMPT_IDS) - 1 or end < 0:
            return events
        self.prompt_ids = events[start + 1 : end]
        if self._shows_ids:
            return events
        return b"%bnull%b" % (events[:start], events[end + 1 :])

    def _read_kept(self) -> None:
        if self._transcript is None:
            self._transcript = Transcript()
        if not self._opaque:
            self._transcript.read(b"".join(self._kept))
        self._kept.clear()

    def _ends_with_done(self) -> bool:
        return self._kept[-1].endswith(DONE) if self._kept else self.read().done

    def _prepend_head(self, data: bytes) -> bytes:
        head, self._head = self._head, b""
        return head + data


def _cut_at_failure(events: bytes) -> tuple[bytes, str]:
    """(events before a failure, what the engine did); an engine's rejection is relayed like any
    event."""
    offset = 0
    for event in events.split(BORDER):
        if event.startswith(_FAILURE):
            if is_failure(event):
                return events[:offset], "reported an error"
        elif _GIVEN_UP in event:
            return events[:offset], "gave the request up"
        offset += len(event) + len(BORDER)
    return events, ""
