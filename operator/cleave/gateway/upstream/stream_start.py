"""Classifies the first events of a stream: forward them, wait for more, or a failure. No I/O.

Used by an attempt, while everything can still be retried elsewhere. What is hard: vLLM sends its
200 before it knows whether the KV can be pulled, and reports a failure as an error event. In chat
an event that carries only the role precedes it, in the same write, so that event is held until the
next has come; if a token follows, this costs no time. An engine may send such events, or one
without an end, for as long as it likes: each byte is searched once, and few are held.
"""

import enum

import msgspec

from cleave.gateway.upstream.response_types import decode_error_event, decode_failure
from cleave.gateway.upstream.spellings import (
    CARRIAGE_RETURN,
    ESCAPE,
    LINE_END,
    PLAIN,
    SpellingError,
    normalize_event,
)

MAX_START_BYTES = 16 << 10
"""More bytes are forwarded as they are, and the relay detects an error. A first event may list
every token id of a prompt."""

_ERROR = b'data: {"error"'
_ERROR_KEY = b'"error"'
_ONLY_END = b"data: [DONE]\n\n"
_OTHER_FIELDS = (b"event:", b"id:", b"retry:", b":")
_FIELDS = (b"data:", *_OTHER_FIELDS)
"""Beginnings of lines of server-sent events."""
_BEGINS = frozenset(field[:end] for field in _FIELDS for end in range(len(field)))
_DATA = len(b"data: ")
_ROLE = b'"delta":{"role":'
_ROLE_SEARCH_BYTES = 1_024
"""Bytes of an event in which the role is searched for."""
_EMPTY_CONTENT = b'"content":""'
_BORDER = b"\n\n"


class StreamStart(enum.Enum):
    """What to do with the bytes so far."""

    PENDING = "pending"
    """Wait for more bytes."""
    STARTED = "started"
    """Forward: the engine responds, perhaps with an error that is the client's fault."""
    FAILED = "failed"


_PENDING, _STARTED, _FAILED = StreamStart.PENDING, StreamStart.STARTED, StreamStart.FAILED
"""Used for every stream, and an enum attribute look-up is slow."""


class PendingStart:
    """The beginning of a stream that may still turn out to be an error."""

    __slots__ = ("_at", "_searched", "data")

    def __init__(self) -> None:
        self.data = bytearray()
        self._at = 0
        """Offset of the first event that is not known to carry only a role."""
        self._searched = 0
        """Offset up to which no event ends after that."""

    def add(self, piece: bytes) -> StreamStart:
        """Append a piece, and classify the events that are complete."""
        data = self.data
        data += piece
        while (end := data.find(_BORDER, self._searched)) >= 0:
            self._searched = end + len(_BORDER)
            event = bytes(data[self._at : self._searched])
            if classify_start(event) is _STARTED:
                return _STARTED
            if not _is_only_role(event):
                return _classify_event(event)
            self._at = self._searched
        self._searched = max(len(data) - 1, self._at)
        begin = bytes(data[self._at : self._at + len(_ERROR)])
        is_no_error = begin.startswith(PLAIN) and not _ERROR.startswith(begin)
        if is_no_error or begin.startswith(_OTHER_FIELDS) or len(data) > MAX_START_BYTES:
            return _STARTED
        is_event = begin.startswith(_FIELDS) or begin in _BEGINS
        return _PENDING if is_event else _FAILED


def classify_start(piece: bytes) -> StreamStart:
    """Whether the first piece of a stream begins with a usual event; pending: it must be held, and
    classified in full."""
    # `rpartition` copies only what it finds; `in` would first try to read bytes as an integer.
    event = piece[: piece.find(_BORDER)] if piece.startswith(PLAIN) else b""
    if (
        not event
        or CARRIAGE_RETURN in event
        or LINE_END in event
        or event.rpartition(_ERROR_KEY)[1]
        or event.rpartition(ESCAPE)[1]
        or event[:_ROLE_SEARCH_BYTES].partition(_ROLE)[1]
        or len(event) == len(piece) - 1
    ):
        return _PENDING
    return _STARTED


def is_failure(event: bytes) -> bool:
    """Whether a normalized event reports an error."""
    if event.startswith(_ERROR):
        return True
    if not event.rpartition(_ERROR_KEY)[1]:
        return False
    try:
        return bytes(decode_failure(event[_DATA:]).error) not in (b"", b"null")
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False


def is_engine_fault(event: bytes) -> bool:
    """Whether an error event is the engine's fault (not a 4xx, which is the client's)."""
    try:
        code = decode_error_event(event[_DATA:]).error.code
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return True
    return not (isinstance(code, int) and 400 <= code < 500)


def _is_only_role(event: bytes) -> bool:
    _, role, after = event[:_ROLE_SEARCH_BYTES].partition(_ROLE)
    return bool(role) and _EMPTY_CONTENT in after


def _classify_event(event: bytes) -> StreamStart:
    """Classify the first complete event that carries more than a role."""
    if not event.startswith(_FIELDS):
        return _FAILED
    try:
        event = normalize_event(event)
    except SpellingError:
        return _FAILED
    if event == _ONLY_END or (is_failure(event) and is_engine_fault(event)):
        return _FAILED
    return _STARTED
