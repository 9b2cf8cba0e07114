"""Relays a server-sent event stream from an engine to a client: bytes in, bytes out. No I/O.

Used by proxied requests. Of the engine's events only ids of tokens are taken out, which the gateway
requested for itself; the chunked framing is this hop's own. What is hard: an engine may be lost at
any byte and another one continue, so only complete events are sent, and what was sent is kept in
the cheapest form: as bytes, which are parsed only if an engine is lost. A stream that ends in
failure must end so that every client notices: with an error event, a proper last chunk, and no
`[DONE]`.
"""

import re
from typing import Protocol

from cleave.gateway.failover.transcript import DONE_EVENT, EVENT_SEPARATOR, Transcript
from cleave.gateway.http.errors import GatewayError
from cleave.gateway.http.headers import LAST_CHUNK, encode_chunk
from cleave.gateway.http.token_estimate import BYTES_PER_TOKEN
from cleave.gateway.upstream.engine_errors import convert_error_event
from cleave.gateway.upstream.kv_transfer_params import HandoffError, contains_handoff
from cleave.gateway.upstream.model_names import ModelNames
from cleave.gateway.upstream.stream_start import is_engine_fault

COMPACTION_MASK = 1_023
"""Every 1,024 events the sent pieces are parsed and dropped, which bounds memory."""
MAX_EVENT_BYTES = 32 << 20

_EVENT_END = b"}\n\n"
_KEY = b'"kv_transfer_params"'
_FAILURE = b'data: {"error"'
_ABORTED = b'"finish_reason":"abort"'
_NEWLINE = 10
_SEPARATOR = EVENT_SEPARATOR
_SEPARATOR_BYTES = len(EVENT_SEPARATOR)
_NUM_SIZE_LINES = 1_024
_SIZE_LINES = [b"%x\r\n" % size for size in range(_NUM_SIZE_LINES)]
"""First lines of chunks, formatted once for nearly all sizes that occur."""
_PROMPT_IDS = b',"prompt_token_ids":['
_IDS = b',"token_ids":['
"""Within a text of JSON the first quote would have a backslash."""
_ALL_IDS = re.compile(rb',"token_ids":\[[^]]*\]')
_IDS_END = b"]"
_OUTPUT_TOKENS = re.compile(rb'"output_tokens":\s*(\d+)')
"""Usage in events of /v1/responses and /v1/messages."""


class StreamLostError(Exception):
    """The engine will not finish its stream; `data` is still to be sent.
    `str()` is the reason and continues `instance NAME ...`."""

    def __init__(self, data: bytes, reason: str) -> None:
        super().__init__(reason)
        self.data = data


class StreamSplice(Protocol):
    """Rewrites another engine's events into the rest of this stream."""

    def rewrite(self, event: bytes) -> bytes:
        """Complete events for the client, or nothing; `event` is without the empty line after it.
        Raises SpliceError when it is not the rest of this stream."""


class SseRelay:
    """One stream to one client."""

    __slots__ = (
        "_chunked", "_head", "_hides_ids", "_names", "_opaque", "_partial_event",
        "_reported_tokens", "_sent_pieces", "_splice", "_transcript", "has_token_ids",
        "num_events", "prompt_ids", "started_at",
    )  # fmt: skip

    def __init__(
        self,
        head: bytes,
        chunked: bool,
        now: float,
        has_token_ids: bool = False,
        opaque: bool = False,
        return_token_ids: bool = False,
        names: ModelNames | None = None,
    ) -> None:
        """`has_token_ids`: the engine sends them; `return_token_ids`: the client requested them.
        `opaque`: not a completion, so the format of its events is unknown. `names`: of the model,
        if engines know it by another name than clients do."""
        self.started_at = now
        """Seconds, when the first byte came."""
        self.num_events = 0
        """Events sent, `[DONE]` not counted: about one per token."""
        self.has_token_ids = has_token_ids
        self.prompt_ids = b""
        """The prompt's token ids as the engine wrote them; empty if it did not."""
        self._reported_tokens = 0
        """Output tokens as the engine reports them; only if `_opaque`."""
        self._head = head
        self._chunked = chunked
        self._opaque = opaque
        self._hides_ids = has_token_ids and not return_token_ids
        self._names = names
        self._partial_event = b""
        """The beginning of an event whose end has not arrived."""
        self._sent_pieces: list[bytes] = []
        self._transcript: Transcript | None = None
        self._splice: StreamSplice | None = None

    def forward(self, piece: bytes, complete: bool) -> bytes:
        """The bytes to send for a piece of the engine's body.
        Raises HandoffError if the piece contains a handoff, StreamLostError when the engine gives
        up, and SpliceError."""
        if self._partial_event or not piece.endswith(_SEPARATOR):
            piece = self._take_complete_events(piece, complete)
        if self._names is not None:
            piece = self._names.restore(piece)
        if self._splice is not None:
            piece = self._rewrite(piece)
        lost = ""
        if piece:
            if not self.num_events and self.has_token_ids:
                piece = self._extract_prompt_ids(piece)
            # Searching a piece is the most expensive step here. `in` first tries to read bytes as
            # an integer and `find` parses its arguments; each doubles the cost of `rpartition`,
            # which copies only what it finds. An integer (`_NEWLINE`) is found at once.
            if piece.rpartition(_KEY)[1] and contains_handoff(piece):
                raise HandoffError("lies in the stream")
            if _NEWLINE not in piece[:-_SEPARATOR_BYTES]:
                events = int(piece.endswith(_EVENT_END))
                failed = piece.startswith(_FAILURE)
            else:
                events = piece.count(_EVENT_END)
                failed = piece.find(_FAILURE) >= 0
            if (failed or (events and piece.rpartition(_ABORTED)[1])) and not self._opaque:
                piece, lost = _truncate_at_failure(piece)
                events = piece.count(_EVENT_END)
        if piece:
            self._sent_pieces.append(piece)
            self.num_events = num_events = self.num_events + events
            if num_events & COMPACTION_MASK < events:
                self._compact_transcript()
            if self._hides_ids:
                if events > 1:
                    piece = _ALL_IDS.sub(b"", piece)
                else:
                    # From the end, where vLLM writes them: half of what a regular expression takes.
                    before, found, rest = piece.rpartition(_IDS)
                    if found:
                        piece = before + rest.partition(_IDS_END)[2]
            if self._chunked:
                size = len(piece)
                line = _SIZE_LINES[size] if size < _NUM_SIZE_LINES else b"%x\r\n" % size
                piece = b"%b%b\r\n" % (line, piece)
        if complete and not lost:
            if self._partial_event or not (self._opaque or self._ends_with_done()):
                lost = "ended its stream early"
            elif self._chunked:
                piece += LAST_CHUNK
        if self._head:
            piece = self._prepend_head(piece)
        if lost:
            raise StreamLostError(piece, lost)
        return piece

    def count_tokens(self) -> int:
        """Tokens sent so far: one per event, or more by ids, text or usage if there are any.
        It parses all events, so it is called for tenants with limits only."""
        tokens = 0
        for choice in self.read_transcript().choices.values():
            text_bytes = sum(map(len, choice.texts.values()))
            tokens += max(choice.counts.values(), default=text_bytes // BYTES_PER_TOKEN)
        return max(self.num_events, self._reported_tokens, tokens)

    def read_transcript(self) -> Transcript:
        """What the client has received so far, parsed."""
        self._compact_transcript()
        assert self._transcript is not None
        return self._transcript

    def set_splice(self, splice: StreamSplice) -> None:
        """From now on the events come from another engine and are rewritten by `splice`."""
        self._splice = splice
        self._partial_event = b""

    def build_end(self, events: bytes) -> bytes:
        """The end of the stream when only these events, or none, are missing."""
        if self._chunked:
            # An empty chunk would be a last one.
            events = (encode_chunk(events) if events else b"") + LAST_CHUNK
        return self._prepend_head(events)

    def build_error_end(self, error: GatewayError) -> bytes:
        """The end of the stream when no engine can continue it."""
        event = b"data: " + error.to_json() + EVENT_SEPARATOR
        return self.build_end(b"event: error\n" + event if self._opaque else event)

    def _take_complete_events(self, piece: bytes, complete: bool) -> bytes:
        """The complete events; an incomplete one waits for the next piece."""
        piece = self._partial_event + piece
        end = piece.rfind(EVENT_SEPARATOR) + len(EVENT_SEPARATOR)
        if end < len(EVENT_SEPARATOR):
            end = 0
        if complete and self._opaque:
            end = len(piece)
        self._partial_event = piece[end:]
        if len(self._partial_event) > MAX_EVENT_BYTES:
            raise StreamLostError(b"", "sent an event that is too long")
        return piece[:end]

    def _rewrite(self, events: bytes) -> bytes:
        splice = self._splice
        assert splice is not None
        return b"".join([splice.rewrite(event) for event in events.split(EVENT_SEPARATOR) if event])

    def _extract_prompt_ids(self, events: bytes) -> bytes:
        """Remove the prompt's token ids, which vLLM sends once, in its first event.
        They are as long as the prompt, so they are removed before any search through the piece, and
        copied instead for a client that requested them."""
        start = events.find(_PROMPT_IDS)
        end = events.find(b"]", start)
        if start < 0 or end < 0:
            return events
        self.prompt_ids = events[start + len(_PROMPT_IDS) : end]
        return events[:start] + events[end + 1 :] if self._hides_ids else events

    def _compact_transcript(self) -> None:
        if self._transcript is None:
            self._transcript = Transcript()
        pieces = b"".join(self._sent_pieces)
        self._sent_pieces.clear()
        if self._opaque:
            reported = map(int, _OUTPUT_TOKENS.findall(pieces))
            self._reported_tokens = max(self._reported_tokens, *reported, 0)
        else:
            self._transcript.read(pieces)

    def _ends_with_done(self) -> bool:
        if self._sent_pieces:
            return self._sent_pieces[-1].endswith(DONE_EVENT)
        return self.read_transcript().done

    def _prepend_head(self, data: bytes) -> bytes:
        head, self._head = self._head, b""
        return head + data


def _truncate_at_failure(events: bytes) -> tuple[bytes, str]:
    """(events before a failure, what the engine did); rejections are relayed, in OpenAI's form."""
    complete: list[bytes] = []
    for event in events.split(EVENT_SEPARATOR):
        if event.startswith(_FAILURE):
            if is_engine_fault(event):
                return EVENT_SEPARATOR.join([*complete, b""]), "reported an error"
            complete.append(convert_error_event(event))
        elif _ABORTED in event:
            return EVENT_SEPARATOR.join([*complete, b""]), "gave the request up"
        else:
            complete.append(event)
    return EVENT_SEPARATOR.join(complete), ""
