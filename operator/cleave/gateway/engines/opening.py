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
_ERROR_BYTES = len(_ERROR)
_DATA = len(b"data: ")
_ROLE = b'"delta":{"role":'
_ROLE_WITHIN = 1_024
"""Bytes of an event; where it stands later, the event is no opening."""
_NOTHING_SAID = b'"content":""'
_BORDER = b"\n\n"


class Opening(enum.Enum):
    """What to do with the bytes so far."""

    HOLD = "hold"
    """They tell nothing yet."""
    BEGIN = "begin"
    """The engine answers; an error that is the client's fault is an answer, too."""
    FAIL = "fail"


_BEGIN = Opening.BEGIN
"""Found for every stream, and looking a member up takes an enum a while."""


def skip_roles(opening: bytes, at: int = 0) -> int:
    """Where the first event begins, from the one at `at` on, that does not only name a role."""
    # By place, not by cutting: the first event may name every token of a prompt.
    while at < len(opening):
        before, role, after = opening[at : at + _ROLE_WITHIN].partition(_ROLE)
        if not role:
            break
        said, nothing, _ = after.partition(_NOTHING_SAID)
        told = at + len(before) + len(role) + len(said)
        # JSON holds no line's end, and one byte is found ten times faster than two.
        end = opening.find(b"\n", at)
        if not nothing or end < told or opening[end : end + 2] != _BORDER:
            break
        at = end + 2
    return at


def judge_event(opening: bytes, at: int) -> Opening:
    """What a stream is whose first event that tells something begins at `at`, if it does yet."""
    if len(opening) > MAX_HELD_BYTES:
        return _BEGIN
    start = opening[at : at + _ERROR_BYTES]
    if start == _ERROR:
        return _judge_error(opening[at:])
    return Opening.HOLD if len(start) < _ERROR_BYTES and _ERROR.startswith(start) else _BEGIN


def is_failure(event: bytes) -> bool:
    """Whether an error event is the engine's fault; one that is the client's is an answer."""
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
