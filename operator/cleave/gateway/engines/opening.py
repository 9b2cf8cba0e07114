"""How a stream begins: whether it may go to the client yet, or is a failure told late. Pure.

Asked by an attempt about a stream's first bytes, while everything may still be tried elsewhere.
What is hard: vLLM sends its 200 before it knows whether the KV can be pulled, and reports that as
an error event. In chat an event that only names the role goes before it, in the same breath, so
that one is held until the next has come; with a token behind it that is no wait either.
"""

import enum

import msgspec

from cleave.gateway.engines.answers import decode_error

MAX_HELD_BYTES = 8 << 20
"""What is longer is no opening; it passes as it is. An opening may name every token of a prompt."""

_ERROR = b'data: {"error"'
_DATA = len(b"data: ")
_ROLE = b'"delta":{"role":'
_ROLE_WITHIN = 1_024
"""Bytes of an event; where it stands later, the event is no opening."""
_NOTHING_SAID = b'"content":""'


class Opening(enum.Enum):
    """What to do with the bytes so far."""

    HOLD = "hold"
    """They tell nothing yet."""
    BEGIN = "begin"
    """The engine answers; an error that is the client's fault is an answer, too."""
    FAIL = "fail"


_BEGIN = Opening.BEGIN
"""Found for every stream, and looking a member up takes an enum a while."""


def judge_opening(opening: bytes) -> Opening:
    """What a stream that has begun with these bytes is."""
    if len(opening) > MAX_HELD_BYTES:
        return _BEGIN
    at = 0
    # By place, not by cutting: the first event may name every token of a prompt.
    while True:
        role = opening.find(_ROLE, at, at + _ROLE_WITHIN)
        if role < 0 or opening.startswith(_ERROR, at) or opening.find(b"\n\n", at, role) >= 0:
            return _judge_event(opening[at:])
        # A line's end is found ten times faster than an event's, and JSON holds none.
        end = opening.find(b"\n", role)
        said = opening.find(_NOTHING_SAID, role, role + _ROLE_WITHIN) < 0
        if said or end < 0 or not opening.startswith(b"\n\n", end):
            return _BEGIN
        at = end + 2


def is_failure(event: bytes) -> bool:
    """Whether an error event is the engine's fault; one that is the client's is an answer."""
    try:
        code = decode_error(event[_DATA:]).error.code
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return True
    return not (isinstance(code, int) and 400 <= code < 500)


def _judge_event(opening: bytes) -> Opening:
    """Of an event that does not name the role."""
    if opening.startswith(_ERROR):
        return _judge_error(opening)
    return Opening.HOLD if _ERROR.startswith(opening) else _BEGIN


def _judge_error(opening: bytes) -> Opening:
    event, end, _ = opening.partition(b"\n\n")
    if not end:
        return Opening.HOLD
    return Opening.FAIL if is_failure(event) else Opening.BEGIN
