"""A stream on its way from an engine to a client: bytes in, bytes out. Used by exchanges; no I/O.

The engine's events stay as they are; only the framing is this hop's own. What is hard: an engine
may be lost at any byte and another one go on, so only whole events go out, and what went out is
kept, as cheaply as can be: the bytes themselves, read by nobody unless an engine is lost. And a
stream that ends for good has to end so that every client notices: with an error event, a proper
last chunk, and no `[DONE]`.
"""

from typing import Protocol

from cleave.gateway.engines.handoff import HandoffError, leaks_handoff
from cleave.gateway.engines.opening import is_failure
from cleave.gateway.errors import ApiError
from cleave.gateway.head import LAST_CHUNK, frame
from cleave.gateway.recovery.transcript import BORDER, DONE, Transcript

KEPT_MASK = 1_023
"""Each 1,024 events those that were kept as they came are read, so that long answers stay small."""
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
"""What a chunk begins with, written once for nearly all there are."""
_PROMPT_IDS = b'"prompt_token_ids":['


class StreamLostError(Exception):
    """The engine will not finish its stream; `data` is still to be sent, `str()` says what it did.

    The reason continues `instance NAME ...`.
    """

    def __init__(self, data: bytes, reason: str) -> None:
        super().__init__(reason)
        self.data = data


class Splice(Protocol):
    """Turns events of another engine into the rest of this stream."""

    def turn(self, event: bytes) -> bytes:
        """Whole events for the client, or nothing; `event` is without the empty line after it.

        Raises SpliceError when it is not the rest of this stream.
        """


class Relay:
    """One stream."""

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
        numbered: bool = False,
        opaque: bool = False,
        shows_ids: bool = False,
    ) -> None:
        """`numbered`: it carries token ids; `shows_ids`: the client asked for them as well.

        `opaque`: not a completion; nothing is known of how its events end.
        """
        self.began_at = now
        """Seconds, when the first byte came."""
        self.events = 0
        """Events that have passed, `[DONE]` not counted: tokens, or nearly so."""
        self.numbered = numbered
        self.prompt_ids = b""
        """The prompt's token ids as the engine wrote them, when it did."""
        self._head = head
        self._chunked = chunked
        self._opaque = opaque
        self._shows_ids = shows_ids
        self._rest = b""
        """Of an event that is not whole yet."""
        self._kept: list[bytes] = []
        self._transcript: Transcript | None = None
        self._splice: Splice | None = None

    def pass_on(self, piece: bytes, complete: bool) -> bytes:
        """What to send for a piece of the engine's body.

        Raises HandoffError if it must not pass, StreamLostError when the engine gives up, and what
        a splice raises.
        """
        if self._rest or not piece.endswith(_BORDER):
            piece = self._cut(piece, complete)
        if self._splice is not None:
            piece = self._turn(piece)
        lost = ""
        if piece:
            if not self.events and self.numbered:
                piece = self._take_prompt_ids(piece)
            # Looking through a piece costs more than all else here. `in` first takes bytes for a
            # number, and `find` takes its arguments apart, either of which costs as much again as
            # `rpartition`, that copies only what it finds; a number is found at once.
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
            self.events = passed = self.events + events
            if passed & KEPT_MASK < events:
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
        """What the client has seen."""
        self._read_kept()
        assert self._transcript is not None
        return self._transcript

    def splice(self, splice: Splice) -> None:
        """Another engine goes on; its events come now."""
        self._splice = splice
        self._rest = b""

    def finish(self, events: bytes) -> bytes:
        """What to send when nothing but these events is missing."""
        return self._prepend_head(frame(events) + LAST_CHUNK if self._chunked else events)

    def break_off(self, error: ApiError) -> bytes:
        """What to send when there is no more to come from any engine."""
        event = b"data: " + error.to_json() + BORDER
        return self.finish(b"event: error\n" + event if self._opaque else event)

    def _cut(self, piece: bytes, complete: bool) -> bytes:
        """The whole events; the rest waits."""
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
        """vLLM states them once, in its first event, as long as the prompt is.

        Taken out first of all, lest every look at the piece goes over them; copied for a client
        that asked for them.
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
    """(events before it, what the engine did); an engine's refusal is an answer like any other."""
    passed = 0
    for event in events.split(BORDER):
        if event.startswith(_FAILURE):
            if is_failure(event):
                return events[:passed], "reported an error"
        elif _GIVEN_UP in event:
            return events[:passed], "gave the request up"
        passed += len(event) + len(BORDER)
    return events, ""
