"""Other ways to write the same JSON and the same server-sent event than vLLM does. Pure.

Used before the gateway looks for something in what engines send: another program at an engine's
port may write it with escapes or on several lines, and clients read it all the same.
"""

import re

MAX_ESCAPED_BYTES = 16 << 10
"""Of a text in which letters are escaped; replacing them takes 2 ms. vLLM escapes none."""
MAX_LINES = 64
"""Of one event."""

ESCAPE = b"\\u00"
"""Begins an escape of a letter."""
PLAIN = b'data: {"'
"""Begins an event as vLLM writes it."""
CARRIAGE_RETURN, LINE_END = b"\r\n"
_ESCAPED_LETTER = re.compile(rb"\\u00[4-7]")
_ESCAPED = re.compile(rb"\\(?:u00(5[fF]|[46][1-9a-fA-F]|[57][0-9aA])|[^\n])")
"""Any escape; the group: the code of a letter or an underscore."""
_DATA = b"data:"
_END = b"\n\n"


class SpellingError(Exception):
    """What an engine sent is written as no engine does, and cannot be read quickly; continues
    `instance NAME ...`."""


def decode_letters(text: bytes) -> bytes:
    """JSON without escapes of letters. Raises SpellingError if it has any and is long."""
    # `rpartition` copies only what it finds; `in` would first try to read bytes as an integer.
    if not text.rpartition(ESCAPE)[1] or _ESCAPED_LETTER.search(text) is None:
        return text
    if len(text) > MAX_ESCAPED_BYTES:
        raise SpellingError("sent long JSON with escaped letters")
    return _ESCAPED.sub(_decode_letter, text)


def normalize_event(event: bytes) -> bytes:
    """A complete event as vLLM writes it: on one line, without escaped letters; unchanged if it has
    no data. Line ends within JSON are blanks. Raises SpellingError."""
    if not event.startswith(PLAIN) or CARRIAGE_RETURN in event or LINE_END in event[: -len(_END)]:
        if event.count(b"\n") + event.count(b"\r") > MAX_LINES:
            raise SpellingError("sent an event of too many lines")
        lines = event.splitlines()
        data = [line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA)]
        event = b"data: %b\n\n" % b" ".join(data) if data else event
    return decode_letters(event)


def match_escapes(text: bytes) -> bytes:
    """Source of a regular expression for a text of letters, each as it is or escaped."""
    return b"".join(map(_match_letter, text))


def _decode_letter(found: re.Match[bytes]) -> bytes:
    digits = found[1]
    return found[0] if digits is None else bytes((int(digits, 16),))


def _match_letter(code: int) -> bytes:
    return rb"(?:%c|\\u00(?i:%x))" % (code, code)
