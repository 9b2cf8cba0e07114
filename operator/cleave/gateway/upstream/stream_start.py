"""Classifies the first bytes of a stream: forward them, wait for more, or treat them as a failure.
Pure.

Used by an attempt, while everything can still be retried elsewhere. What is hard: vLLM sends its
200 before it knows whether the KV can be pulled, and reports a failure as an error event. In chat
an event that carries only the role precedes it, in the same write, so that event is held until the
next has come; if a token follows, this costs no time.
"""

import enum

import msgspec

from cleave.gateway.upstream.response_types import decode_error

MAX_HELD_BYTES = 8 << 20
"""More bytes than this are forwarded as they are. A first event may list every token id of a
prompt."""

_ERROR = b'data: {"error"'
_ERROR_BYTES = len(_ERROR)
_DATA = len(b"data: ")
_ROLE = b'"delta":{"role":'
_ROLE_WITHIN = 1_024
"""Bytes of an event in which the role is searched for."""
_NOTHING_SAID = b'"content":""'
_BORDER = b"\n\n"


class Opening(enum.Enum):
    """What to do with the bytes so far."""

    HOLD = "hold"
    """Wait for more bytes."""
    BEGIN = "begin"
    """Forward: the engine responds, perhaps with an error that is the client's fault."""
    FAIL = "fail"


_BEGIN = Opening.BEGIN
"""Used for every stream, and an enum attribute look-up is slow."""


def skip_roles(opening: bytes, at: int = 0) -> int:
    """Offset of the first event, from the one at `at` on, that carries more than a role."""
    # Offsets instead of slices: the first event may list every token id of a prompt.
    while at < len(opening):
        before, role, after = opening[at : at + _ROLE_WITHIN].partition(_ROLE)
        if not role:
            break
        between, empty, _ = after.partition(_NOTHING_SAID)
        content_at = at + len(before) + len(role) + len(between)
        # JSON contains no line end, and one byte is found ten times faster than two.
        end = opening.find(b"\n", at)
        if not empty or end < content_at or opening[end : end + 2] != _BORDER:
            break
        at = end + 2
    return at


def judge_event(opening: bytes, at: int) -> Opening:
    """Classify a stream whose first event with content begins at `at`."""
    if len(opening) > MAX_HELD_BYTES:
        return _BEGIN
    start = opening[at : at + _ERROR_BYTES]
    if start == _ERROR:
        return _judge_error(opening[at:])
    return Opening.HOLD if len(start) < _ERROR_BYTES and _ERROR.startswith(start) else _BEGIN


def is_failure(event: bytes) -> bool:
    """Whether an error event is the engine's fault (not a 4xx, which is the client's)."""
    try:
        code = decode_error(event[_DATA:]).error.code
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return True
    return not (isinstance(code, int) and 400 <= code < 500)


def _judge_error(opening: bytes) -> Opening:
    event, end, _ = opening.partition(_BORDER)
    if not end:
        return Opening.HOLD
    return Opening.FAIL if is_failure(event) else Opening.BEGIN
