"""Splits a large JSON object or list into its members, in slices that each take about 1 ms.

The client connection calls it for bodies above `MIN_BYTES`, between requests of others. msgspec
would take 20 to 80 ms for a body of 16 MiB, and it holds the interpreter's lock, so that neither
the event loop nor a thread could serve anybody meanwhile. Slices take two to four times as long
in all, which nobody but the sender of the body feels.

What is hard: values are not validated, only delimited. Of valid JSON the members are exactly those
that every parser finds: quotes that are not escaped delimit strings, and brackets outside strings
nest. Of invalid JSON they may be anything, and the engine refuses the whole request, because its
parser is strict and every value stays in the body that it gets. Keys and short values are decoded
by msgspec afterwards.

A slice is an array of bytes, and each step is an operation on all of it:
1. A quote counts unless an odd number of backslashes stands before it.
2. A byte is inside a string when an odd number of quotes has come before it.
3. Outside strings brackets change the depth; commas and colons of depth 1 delimit members.
"""

import re
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from cleave.gateway.http.bounded_json import TooManyMembersError

MIN_BYTES: Final = 1 << 20
"""Below, msgspec takes at most 5 ms."""
SLICE_BYTES: Final = 64 << 10
MAX_KEY_BYTES: Final = 4_096
MAX_DEPTH: Final = 1_000
"""Of nested objects and lists; parsers that recurse end there or earlier."""
_SPACE = re.compile(rb"[ \t\n\r]*")
_OTHER, _OPEN, _CLOSE, _COMMA, _COLON = range(5)
_KINDS = np.zeros(256, np.int8)
for _characters, _kind in ((b"[{", _OPEN), (b"]}", _CLOSE), (b",", _COMMA), (b":", _COLON)):
    _KINDS[list(_characters)] = _kind
_DEPTH_CHANGES = np.array([0, 1, -1, 0, 0], np.int32)
_QUOTE, _BACKSLASH = b'"\\'
_decode_key = msgspec.json.Decoder(str).decode


class MemberScanner:
    """Scans one JSON object or list; `step` until it is done, then take `members` or `elements`."""

    def __init__(self, text: bytes | msgspec.Raw, limit: int) -> None:
        """`limit`: most members."""
        self._text = memoryview(text)
        self._bytes = np.frombuffer(text, np.uint8)
        self._limit = limit
        self._position = 0
        self._depth = 0
        self._inside = np.uint8(0)
        """1: the slice begins inside a string."""
        self._escaped = False
        """The first byte of the slice follows an odd number of backslashes."""
        self._commas: list[int] = []
        self._colons: list[int] = []
        self._bounds: tuple[int, int] | None = None
        """Where the first bracket opens and where it closes."""
        self._start = -1

    def step(self) -> bool:
        """Scan the next slice; True: it was the last one.

        Raises TooManyMembersError, and msgspec.DecodeError when the text is no JSON object or list.
        """
        start = self._position
        data = self._bytes[start : start + SLICE_BYTES]
        if not data.size:
            raise msgspec.DecodeError("Input data was truncated")
        outside = self._find_outside(data)
        places = np.flatnonzero(outside & (_KINDS[data] != _OTHER))
        kinds = _KINDS[data[places]]
        depths = np.cumsum(_DEPTH_CHANGES[kinds], dtype=np.int32) + self._depth
        if places.size:
            self._record(places + start, kinds, depths)
            self._depth = int(depths[-1])
            if depths.max() > MAX_DEPTH:
                raise msgspec.DecodeError(f"nested more than {MAX_DEPTH} deep")
        self._position = start + data.size
        if self._position < self._bytes.size:
            return False
        if self._bounds is None or self._inside:
            raise msgspec.DecodeError("Input data was truncated")
        first, last = self._bounds
        if (
            self._skip(0, first) < first
            or self._skip(last + 1, self._bytes.size) < self._bytes.size
        ):
            raise msgspec.DecodeError("JSON is malformed: invalid character")
        return True

    def list_members(self) -> dict[str, msgspec.Raw]:
        """The members of an object, of equal keys the last one. Raises msgspec.DecodeError."""
        first, last = self._delimit(b"{")
        fields: dict[str, msgspec.Raw] = {}
        colons = iter(self._colons)
        for start, end in self._list_spans(first, last):
            colon = next(colons, end)
            value_start = self._skip(colon + 1, end) if colon < end else end
            if value_start == end:
                raise msgspec.DecodeError("JSON is malformed: expected a key and a value")
            if colon - start > MAX_KEY_BYTES:
                raise msgspec.DecodeError(f"a field's name is longer than {MAX_KEY_BYTES} bytes")
            key = _decode_key(self._text[start:colon])
            fields[key] = msgspec.Raw(self._text[value_start:end])
        if next(colons, None) is not None:
            raise msgspec.DecodeError("JSON is malformed: more colons than fields")
        return fields

    def list_elements(self) -> list[msgspec.Raw]:
        """The elements of a list. Raises msgspec.DecodeError."""
        first, last = self._delimit(b"[")
        spans = [(self._skip(start, end), end) for start, end in self._list_spans(first, last)]
        if self._colons or any(start == end for start, end in spans):
            raise msgspec.DecodeError("JSON is malformed: expected an element")
        return [msgspec.Raw(self._text[start:end]) for start, end in spans]

    def _skip(self, start: int, end: int) -> int:
        """Where white space ends that begins at `start`."""
        match = _SPACE.match(self._text, start, end)
        assert match is not None
        return match.end()

    def _find_outside(self, data: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Which bytes are outside strings; closing quotes are, opening ones are not."""
        quotes = data == _QUOTE
        slashes = data == _BACKSLASH
        if self._escaped or slashes.any():
            # The number of backslashes before a byte: its distance from the last other byte.
            places = np.arange(data.size, dtype=np.int32)
            others = np.maximum.accumulate(np.where(slashes, np.int32(-1), places))
            run = places - others
            run[others < 0] += self._escaped
            quotes[1:] &= (run[:-1] & 1) == 0
            quotes[0] &= not self._escaped
            self._escaped = bool(run[-1] & 1)
        inside = np.bitwise_xor.accumulate(quotes.view(np.uint8)) ^ self._inside
        self._inside = inside[-1]
        outside: NDArray[np.bool_] = inside == 0
        return outside

    def _record(
        self, places: NDArray[np.int64], kinds: NDArray[np.int8], depths: NDArray[np.int32]
    ) -> None:
        """Note the delimiters of the outermost level; all arrays: one entry for each delimiter."""
        if self._start < 0:
            self._start = int(places[0])
            if kinds[0] != _OPEN:
                raise msgspec.DecodeError("JSON is malformed: expected an object or a list")
        (ends,) = np.nonzero(depths <= 0)
        if self._bounds is not None or (ends.size and ends[0] != depths.size - 1):
            raise msgspec.DecodeError("JSON is malformed: trailing characters")
        if ends.size:
            self._bounds = self._start, int(places[-1])
        outermost = depths == 1
        for kind, found in ((_COMMA, self._commas), (_COLON, self._colons)):
            delimiters = places[outermost & (kinds == kind)]
            if len(found) + delimiters.size > self._limit:
                raise TooManyMembersError
            found += delimiters.tolist()

    def _delimit(self, bracket: bytes) -> tuple[int, int]:
        """Where the outermost brackets are, once all is scanned."""
        assert self._bounds is not None
        first, last = self._bounds
        pair = bytes((self._bytes[first], self._bytes[last]))
        if pair != (b"{}" if bracket == b"{" else b"[]"):
            raise msgspec.DecodeError(f"Expected `{'object' if bracket == b'{' else 'array'}`")
        return first, last

    def _list_spans(self, first: int, last: int) -> list[tuple[int, int]]:
        """(start, end) of each member between the outermost brackets."""
        if not self._commas and self._skip(first + 1, last) == last:
            return []
        starts = [first, *self._commas]
        ends = [*self._commas, last]
        if len(starts) > self._limit:
            raise TooManyMembersError
        return [(start + 1, end) for start, end in zip(starts, ends, strict=True)]
