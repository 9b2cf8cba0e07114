"""Classifies the first bytes of a stream: forward them, wait for more, or a failure. Pure.

Used by an attempt, while everything can still be retried elsewhere. What is hard: vLLM sends its
200 before it knows whether the KV can be pulled, and reports a failure as an error event. In chat
an event that carries only the role precedes it, in the same write, so that event is held until the
next has come; if a token follows, this costs no time.
"""

import enum

import msgspec

from cleave.gateway.upstream.response_types import decode_error_event

MAX_START_BYTES = 8 << 20
"""More bytes are forwarded as they are. A first event may list every token id of a prompt."""

_ERROR = b'data: {"error"'
_ERROR_BYTES = len(_ERROR)
_ONLY_END = b"data: [DONE]\n\n"
_FIELDS = (b"data:", b"event:", b"id:", b"retry:", b":")
"""Beginnings of lines of server-sent events."""
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


_STARTED = StreamStart.STARTED
"""Used for every stream, and an enum attribute look-up is slow."""


def skip_role_deltas(data: bytes, at: int = 0) -> int:
    """Offset of the first event, from the one at `at` on, that carries more than a role."""
    # Offsets instead of slices: the first event may list every token id of a prompt.
    while at < len(data):
        before, role, after = data[at : at + _ROLE_SEARCH_BYTES].partition(_ROLE)
        if not role:
            break
        between, empty, _ = after.partition(_EMPTY_CONTENT)
        content_at = at + len(before) + len(role) + len(between)
        # JSON contains no line end, and one byte is found ten times faster than two.
        end = data.find(b"\n", at)
        if not empty or end < content_at or data[end : end + 2] != _BORDER:
            break
        at = end + 2
    return at


def classify_start(data: bytes, at: int) -> StreamStart:
    """Classify a stream whose first event with content begins at `at`."""
    if len(data) > MAX_START_BYTES:
        return _STARTED
    start = data[at : at + _ERROR_BYTES]
    if start == _ERROR:
        return _classify_error(data[at:])
    if len(start) < _ERROR_BYTES and (_ERROR.startswith(start) or _ONLY_END.startswith(start)):
        return StreamStart.PENDING
    return _STARTED if start.startswith(_FIELDS) and start != _ONLY_END else StreamStart.FAILED


def is_engine_fault(event: bytes) -> bool:
    """Whether an error event is the engine's fault (not a 4xx, which is the client's)."""
    try:
        code = decode_error_event(event[_DATA:]).error.code
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return True
    return not (isinstance(code, int) and 400 <= code < 500)


def _classify_error(data: bytes) -> StreamStart:
    event, end, _ = data.partition(_BORDER)
    if not end:
        return StreamStart.PENDING
    return StreamStart.FAILED if is_engine_fault(event) else StreamStart.STARTED
