"""Relays a server-sent event stream from an engine to a client: bytes in, bytes out. No I/O.

Used by proxied requests. Of the engine's events only what the gateway requested for itself is taken
out: ids of tokens or usage, by which tokens are counted. The chunked framing is this hop's own.
What is hard: an engine may be lost at any byte and another one continue, so only complete events
are sent, and the transcript keeps what that takes. Most events match a template and are not looked
into, as that would cost more than all the rest. A stream that ends in failure must end so that
every client notices: with an error event, a proper last chunk, and no `[DONE]`.
"""

import re
from collections.abc import Sequence
from typing import Protocol

from cleave.gateway.failover.resumption import is_repeatable
from cleave.gateway.failover.retry_policy import Failure
from cleave.gateway.failover.splice import SpliceError
from cleave.gateway.failover.transcript import (
    DONE_EVENT,
    EVENT_SEPARATOR,
    MAX_PENDING_BYTES,
    Transcript,
)
from cleave.gateway.http.buffer_budget import BufferBudget
from cleave.gateway.http.completion_request import CompletionRequest
from cleave.gateway.http.errors import EVENT_TOO_LONG, GatewayError
from cleave.gateway.http.headers import LAST_CHUNK, encode_chunk
from cleave.gateway.proxy.event_splitter import EventSplitter, EventTooLongError
from cleave.gateway.proxy.event_template import (
    IDS,
    PROMPT_IDS,
    EventTemplate,
    are_ids,
    find_template,
    learn_form,
)
from cleave.gateway.proxy.usage_counts import UsageCounts
from cleave.gateway.upstream.engine_errors import convert_error_event
from cleave.gateway.upstream.kv_transfer_params import HandoffError, contains_handoff
from cleave.gateway.upstream.model_names import ModelNames
from cleave.gateway.upstream.prompt_details import PromptDetails
from cleave.gateway.upstream.spellings import (
    CARRIAGE_RETURN,
    ESCAPE,
    PLAIN,
    SpellingError,
    decode_letters,
    normalize_event,
)
from cleave.gateway.upstream.stream_start import is_engine_fault, is_failure

MAX_SLOW_EVENTS = 512
"""In one piece: more events that match no template are not written by vLLM, and are not read."""
MAX_LEARNT_BYTES = 16 << 10
"""Of an event whose form is learnt or recognized: of one token, or of some."""
MAX_TRIES = 16
"""To learn the form of events, for each engine of a stream."""

_EVENT_END = b"}\n\n"
_KEY = b'"kv_transfer_params"'
_ERROR_KEY = b'"error"'
_ABORT = b'"abort"'
_ABORTED = re.compile(rb'"finish_reason"\s*:\s*"abort"')
_EMPTY_DELTA = b'"delta":{},"logprobs":null,"finish_reason":null'
_NEWLINE = 10
_SEPARATOR = EVENT_SEPARATOR
_SEPARATOR_BYTES = len(EVENT_SEPARATOR)
_NUM_SIZE_LINES = 1_024
_SIZE_LINES = [b"%x\r\n" % size for size in range(_NUM_SIZE_LINES)]
"""First lines of chunks, formatted once for nearly all sizes that occur."""
_IDS_END = 93
_IDS_WITHIN_BYTES = 16 << 10
"""Of the end of an event: where the ids of its tokens lie."""
_NO_PROMPT_IDS = PROMPT_IDS + b"]"


class StreamLostError(Exception):
    """The stream cannot go on; `data` is still to be sent.
    `str()` is the reason and continues `instance NAME ...`."""

    def __init__(
        self,
        data: bytes,
        reason: str,
        failure: Failure = Failure.LOST,
        error: GatewayError | None = None,
    ) -> None:
        """`error`: for the client; None: names the instance and the reason."""
        super().__init__(reason)
        self.data = data
        self.failure = failure
        self.error = error


class StreamSplice(Protocol):
    """Rewrites another engine's events into the rest of this stream."""

    def rewrite(self, event: bytes) -> bytes:
        """Complete events for the client, or nothing; `event` is without the empty line after it.
        Raises SpliceError when it is not the rest of this stream."""


class SseRelay:
    """One stream to one client."""

    __slots__ = (
        "_chunked", "_has_ids", "_head", "_hides_ids", "_is_counted", "_is_done", "_names",
        "_num_slow", "_opaque", "_prompt_ids", "_splice", "_splitter", "_template", "_tries_left",
        "_usage", "num_events", "prompt_details", "prompt_tokens", "started_at", "transcript",
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
        *,
        transcript: Transcript | None = None,
        usage: UsageCounts | None = None,
    ) -> None:
        """`has_token_ids`: the engine sends them; `return_token_ids`: the client requested them.
        `opaque`: not a completion, so the format of its events is unknown. `names`: of the model,
        if engines know it by another name than clients do. `usage`: counts tokens without ids."""
        self.started_at = now
        """Seconds, when the first byte came."""
        self.num_events = 0
        """Events that match no template, `[DONE]` not counted."""
        self.prompt_details: PromptDetails | None = None
        """What `usage` says instead of the engine's details; None: they are right."""
        self.prompt_tokens = 0
        """As the engine reported them; 0: it did not."""
        self.transcript = transcript if transcript is not None else Transcript()
        self._head = head
        self._chunked = chunked
        self._opaque = opaque
        self._has_ids = has_token_ids
        self._hides_ids = has_token_ids and not return_token_ids
        self._names = names
        self._usage = usage
        self._is_counted = False
        """Whether the engine has sent ids of tokens."""
        self._is_done = False
        """Whether the last event was `[DONE]`."""
        self._splitter: EventSplitter | None = None
        """Made when an event comes in several pieces."""
        self._prompt_ids = b""
        """Of the event that it completed last, in which they are missing."""
        self._splice: StreamSplice | None = None
        self._template: EventTemplate | None = None
        self._tries_left = MAX_TRIES
        self._num_slow = 0
        """Events of one piece that match no template."""

    def forward(self, piece: bytes, complete: bool) -> bytes:
        """The bytes to send for a piece of the engine's body.
        Raises HandoffError if the piece contains a handoff, StreamLostError when the engine gives
        up, and SpliceError."""
        if self._splitter is not None or not piece.endswith(_SEPARATOR):
            piece = self._take_complete_events(piece, complete)
        if self._names is not None:
            piece = self._names.restore(piece)
        if self._splice is not None:
            piece = self._rewrite(piece)
        lost = ""
        if self._template is not None and (known := self._forward_known(piece)):
            # As nearly every token does, by itself.
            piece = known
        elif piece:
            piece, lost = self._forward_events(piece)
        if piece and self._chunked:
            size = len(piece)
            line = _SIZE_LINES[size] if size < _NUM_SIZE_LINES else b"%x\r\n" % size
            piece = b"%b%b\r\n" % (line, piece)
        if complete and not lost:
            if self._splitter is not None or not (self._opaque or self._is_done):
                lost = "ended its stream early"
            elif self._chunked:
                piece += LAST_CHUNK
        if self._head:
            piece = self._prepend_head(piece)
        if lost:
            raise StreamLostError(piece, lost)
        return piece

    @property
    def num_tokens(self) -> int:
        """Output tokens that the engine has reported so far; events, if it reports none."""
        if self._usage is not None and self._usage.is_counted:
            return self._usage.num_tokens
        return self.transcript.num_ids if self._is_counted else self.num_events

    @property
    def progress(self) -> int:
        """Grows with each event."""
        return self.num_events + self.transcript.num_ids

    def limit_tokens(self) -> int:
        """The most output tokens that it can have so far: those that the engine has reported; one
        for each byte of text, if it reports none."""
        is_reported = self._is_counted or (self._usage is not None and self._usage.is_counted)
        if is_reported or self._opaque:
            return self.num_tokens
        return max(self.num_events, self.read_transcript().text_bytes)

    def read_transcript(self) -> Transcript:
        """What the client has received so far."""
        self.transcript.read()
        return self.transcript

    def set_splice(self, splice: StreamSplice) -> None:
        """From now on the events come from another engine and are rewritten by `splice`."""
        self._splice = splice
        self._forget_partial()
        self._template, self._tries_left = None, MAX_TRIES

    def close(self) -> None:
        """The stream has ended: forget what is kept of it."""
        self._forget_partial()
        self.transcript.close()

    def build_end(self, events: bytes) -> bytes:
        """The end of the stream when only these events, or none, are missing."""
        if self._chunked:
            # An empty chunk would be a last one.
            events = (encode_chunk(events) if events else b"") + LAST_CHUNK
        return self._prepend_head(events)

    def build_error_end(self, error: GatewayError) -> bytes:
        """The end of the stream when no engine can continue it."""
        if self.transcript.done:
            return self.build_end(b"")
        event = b"data: " + error.to_json() + EVENT_SEPARATOR
        return self.build_end(b"event: error\n" + event if self._opaque else event)

    def _take_complete_events(self, piece: bytes, complete: bool) -> bytes:
        """The complete events; an incomplete one waits for the next piece."""
        splitter = self._splitter
        if splitter is None:
            if not piece:
                return piece
            splitter = self._splitter = EventSplitter(self.transcript.budget)
        if complete and self._opaque:
            piece = splitter.take(piece) + bytes(splitter.partial)
            self._prompt_ids = splitter.prompt_ids
            self._forget_partial()
            return piece
        try:
            events = splitter.take(piece)
        except EventTooLongError:
            self._splitter = None
            reason = "sent an event that is too long"
            raise StreamLostError(b"", reason, Failure.TOO_LONG, EVENT_TOO_LONG) from None
        self._prompt_ids = splitter.prompt_ids
        if not splitter.partial:
            self._splitter = None
        return events

    def _forget_partial(self) -> None:
        if self._splitter is not None:
            self._splitter.clear()
            self._splitter = None

    def _rewrite(self, events: bytes) -> bytes:
        splice = self._splice
        assert splice is not None
        try:
            return b"".join(
                [splice.rewrite(event) for event in events.split(EVENT_SEPARATOR) if event]
            )
        except (AttributeError, KeyError, TypeError, ValueError):
            raise SpliceError("sent an event of another form than those before") from None

    def _forward_events(self, piece: bytes) -> tuple[bytes, str]:
        """(what the client gets of complete events, how the engine gave up in them)."""
        if self._opaque:
            try:
                piece = decode_letters(piece)
            except SpellingError as error:
                return b"", str(error)
            if piece.rpartition(_KEY)[1] and contains_handoff(piece):
                raise HandoffError("lies in the stream")
            self.num_events += piece.count(_EVENT_END)
            return (self._restore_prompt_ids(piece) if self._prompt_ids else piece), ""
        if self._is_done:
            return b"", "sent more than its answer"
        self._num_slow = 0
        # An integer is found at once; `in` would first try to read bytes as one.
        if _NEWLINE not in piece[:-_SEPARATOR_BYTES]:
            return self._forward_event(piece)
        shown, lost = [], ""
        for event in _split(piece):
            data, lost = self._forward_event(event)
            shown.append(data)
            if lost or self._is_done:
                break
        return b"".join(shown), lost

    def _forward_event(self, event: bytes) -> tuple[bytes, str]:
        """The same for one event."""
        if self._template is not None and (known := self._forward_known(event)):
            return known, ""
        if event == DONE_EVENT:
            return self._end(), ""
        # `rpartition` copies only what it finds; `find` would parse its arguments.
        if (
            not event.startswith(PLAIN)
            or CARRIAGE_RETURN in event
            or _NEWLINE in event[:-_SEPARATOR_BYTES]
            or event.rpartition(ESCAPE)[1]
        ):
            try:
                event = normalize_event(event)
            except SpellingError as error:
                return b"", str(error)
            if event == DONE_EVENT:
                return self._end(), ""
        if event.rpartition(_ERROR_KEY)[1] and is_failure(event):
            if is_engine_fault(event):
                return b"", "reported an error"
            event = convert_error_event(event[:-_SEPARATOR_BYTES]) + EVENT_SEPARATOR
        if event.rpartition(_KEY)[1] and contains_handoff(event):
            raise HandoffError("lies in the stream")
        if not event.endswith(_EVENT_END):
            if event != EVENT_SEPARATOR:
                self._record(event)
            return event, ""
        if event.rpartition(_ABORT)[1] and _ABORTED.search(event) is not None:
            return b"", "gave the request up"
        if self._has_ids and self.num_events and len(event) <= MAX_LEARNT_BYTES:
            # The first event is never like those that follow.
            self._template = find_template(event)
            if self._template is not None:
                self._is_counted = True
                self.transcript.end_run()
                self.transcript.set_path(self._template.path)
                return self._forward_known(event), ""
        self.num_events += 1
        return self._forward_unknown(event), ""

    def _end(self) -> bytes:
        """The engine has said that nothing follows."""
        self._is_done = self.transcript.done = True
        self._template = None
        return DONE_EVENT

    def _forward_known(self, event: bytes) -> bytes:
        """What the client gets of an event that matches the template; nothing: it does not."""
        template, sent = self._template, self.transcript
        if template is None:
            return b""
        found = template.match(event)
        if found is None:
            return b""
        text, ids = found
        output_ids = sent.output_ids
        output_ids += ids
        output_ids.append(_IDS_END)
        if len(output_ids) > sent.ids_room:
            sent.add_room()
        if sent.keeps_text:
            sent.text += text
            if len(sent.text) > MAX_PENDING_BYTES:
                sent.close_text()
        return template.start + text + template.shown_end if self._hides_ids else event

    def _forward_unknown(self, event: bytes) -> bytes:
        """What the client gets of an event that matches no template."""
        if self.prompt_details is not None:
            event = self.prompt_details.replace(event)
        if self._usage is not None:
            event = self._usage.take(event)
            self.prompt_tokens = self._usage.prompt_tokens or self.prompt_tokens
            if event:
                self._record(event)
            return self._restore_prompt_ids(event) if self._prompt_ids else event
        if not self._has_ids:
            self._record(event)
            return self._restore_prompt_ids(event) if self._prompt_ids else event
        plain, ids = self._take_ids(event)
        self.transcript.end_run(ids)
        self._record(plain)
        is_short = len(event) <= MAX_LEARNT_BYTES
        if ids and self._tries_left and self.num_events > 1 and is_short:
            self._tries_left -= 1
            learn_form(event)
        if not self._hides_ids:
            return self._restore_prompt_ids(event) if self._prompt_ids else event
        # Without ids vLLM sends no event for a token that it holds back.
        return b"" if plain.rpartition(_EMPTY_DELTA)[1] else plain

    def _record(self, event: bytes) -> None:
        """Add an event, as the client gets it without ids, to the transcript."""
        self._num_slow += 1
        if self._num_slow > MAX_SLOW_EVENTS:
            self.transcript.skip_event(event)
            return
        is_counted = self._is_counted or (self._usage is not None and self._usage.is_counted)
        self.transcript.add_event(event, is_measured=not is_counted)

    def _take_ids(self, event: bytes) -> tuple[bytes, bytes]:
        """(an event without ids of tokens, the ids)."""
        start = event.find(PROMPT_IDS)
        if start >= 0:
            # As long as the prompt, so removed before any search.
            at = start + len(PROMPT_IDS)
            end = event.find(b"]", at)
            ids = event[at:end] or self._prompt_ids
            if not self.prompt_tokens and ids and are_ids(ids):
                self.prompt_tokens = ids.count(b",") + 1
                self.transcript.set_prompt_ids(ids)
            event = event[:start] + event[end + 1 :]
        start = event.rfind(IDS, -_IDS_WITHIN_BYTES)
        if start < 0:
            return event, b""
        ids, _, rest = event[start + len(IDS) :].partition(b"]")
        self._is_counted = True
        return event[:start] + rest, ids if are_ids(ids) else b""

    def _restore_prompt_ids(self, data: bytes) -> bytes:
        """Events for the client with the ids of a prompt that the splitter has taken out."""
        before, found, after = data.partition(_NO_PROMPT_IDS)
        ids, self._prompt_ids = self._prompt_ids, b""
        return b"%b%b%b]%b" % (before, PROMPT_IDS, ids, after) if found else data

    def _prepend_head(self, data: bytes) -> bytes:
        head, self._head = self._head, b""
        return head + data


def make_relay(
    completion: CompletionRequest,
    head: bytes,
    chunked: bool,
    now: float,
    names: ModelNames | None,
    budget: BufferBudget,
    prompt_details: PromptDetails | None = None,
) -> SseRelay:
    """The relay for a request; what it keeps is reserved in the budget."""
    report = completion.report
    if report is None:
        return SseRelay(head, chunked, now, opaque=True, names=names)
    transcript = Transcript(
        budget,
        keeps_ids=completion.can_continue,
        keeps_text=is_repeatable(completion.fields),
        shows_ids=report.shows_ids,
        num_choices=report.num_choices,
    )
    usage = None if report.has_ids else UsageCounts(report)
    options = report.has_ids, False, report.shows_ids, names
    relay = SseRelay(head, chunked, now, *options, transcript=transcript, usage=usage)
    relay.prompt_details = prompt_details
    return relay


def _split(events: bytes) -> Sequence[bytes]:
    """Each event with the separator after it."""
    parts = events.split(EVENT_SEPARATOR)
    parts.pop()
    return [part + EVENT_SEPARATOR for part in parts]
