"""Splits a large JSON object or list into its members, in slices that each take less than 1 ms.

Used for JSON above `MIN_BYTES`, in time slices between other clients' requests. msgspec would take
20 to 80 ms for a body of 16 MiB while holding the GIL, so neither the event loop nor another thread
could serve requests. All slices together take two to four times as long, which only delays the
sender of the body.

What is hard: values are delimited, not parsed. For valid JSON the members are those that every
parser finds: unescaped quotes delimit strings, and brackets outside strings nest. For invalid JSON
they may be anything, but the engine rejects the request, because it receives every value and its
parser, Python's, is strict but for three things, which are refused here: `NaN` and `Infinity`,
surrogates in UTF-8, and escapes of surrogates that are no pair. Keys and short values are decoded
by msgspec afterwards.

A slice is an array of bytes, and each step is an operation on all of it:
1. A quote counts unless an odd number of backslashes precedes it.
2. A byte is inside a string if an odd number of quotes precedes it.
3. Outside strings, brackets change the depth; commas and colons at depth 1 delimit members.
A slice inside one string, as of a picture, needs none of this.
"""

import codecs
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from cleave.gateway.http.bounded_json import TooManyMembersError
from cleave.time_slices import Steps

MIN_BYTES: Final = 256 << 10
"""msgspec takes up to 1.2 ms for smaller JSON that has few members."""
SLICE_BYTES: Final = 32 << 10
MAX_KEY_BYTES: Final = 4_096
MAX_DEPTH: Final = 1_000
"""Limit of nested objects and lists; recursive parsers have this limit or a lower one."""
MAX_SPACE_BYTES: Final = 1_024
"""Limit of the white space before a value or a key, which is skipped at the end, in one go."""
_SPACE = b" \t\n\r"
_OTHER, _OPEN, _CLOSE, _COMMA, _COLON, _WORD = range(6)
"""_WORD: a character of NaN or Infinity that no other word or number has."""
_KINDS = np.zeros(256, np.int8)
for _characters, _kind in (
    *((b"[{", _OPEN), (b"]}", _CLOSE), (b",", _COMMA), (b":", _COLON), (b"NI", _WORD)),
):
    _KINDS[list(_characters)] = _kind
_DEPTH_CHANGES = np.array([0, 1, -1, 0, 0, 0], np.int32)
_HIGH, _LOW = 1, 2
_SURROGATES = np.zeros(256, np.int8)
"""By the third character of `\\uD8..`: whether it begins a pair of surrogates, or ends one."""
for _characters, _kind in ((b"89abAB", _HIGH), (b"cdefCDEF", _LOW)):
    _SURROGATES[list(_characters)] = _kind
_PAIR_BYTES = 6
"""From a surrogate's escape to that of its other half."""
_QUOTE, _BACKSLASH, _U, _D = b'"\\ud'
_decode_key = msgspec.json.Decoder(str).decode
_make_decoder = codecs.getincrementaldecoder("utf-8")


class MemberScanner:
    """Scans one object or list: `step` until it returns True, `list_members` or `list_elements`."""

    def __init__(self, text: bytes | bytearray | memoryview | msgspec.Raw, limit: int) -> None:
        """`limit`: maximum number of members."""
        self._text = memoryview(text)
        self._bytes = np.frombuffer(text, np.uint8)
        self._limit = limit
        self._position = 0
        self._depth = 0
        self._inside = np.uint8(0)
        """1: the next slice begins inside a string."""
        self._escaped = False
        """The first byte of the next slice follows an odd number of backslashes."""
        self._decoder = _make_decoder()
        self._expected_half = -1
        """Where the other half of a pair of surrogates must be; -1: none is due."""
        self._commas: list[int] = []
        self._colons: list[int] = []
        self._bounds: tuple[int, int] | None = None
        """Positions of the outermost brackets."""
        self._start = -1

    def step(self) -> bool:
        """Scan the next slice; True: it was the last one. Raises TooManyMembersError, and
        msgspec.DecodeError or UnicodeDecodeError if it is not a JSON object or list."""
        start = self._position
        data = self._bytes[start : start + SLICE_BYTES]
        if not data.size:
            raise msgspec.DecodeError("Input data was truncated")
        end = start + data.size
        self._decoder.decode(self._text[start:end], end == self._bytes.size)
        if self._is_within_string(data):
            self._position = end
            return self._end()
        outside = self._find_outside(data)
        positions = np.flatnonzero(outside & (_KINDS[data] != _OTHER))
        kinds = _KINDS[data[positions]]
        if kinds.size and kinds.max() == _WORD:
            raise msgspec.DecodeError("NaN and Infinity are not JSON")
        depths = np.cumsum(_DEPTH_CHANGES[kinds], dtype=np.int32) + self._depth
        if positions.size:
            self._record(positions + start, kinds, depths)
            self._depth = int(depths[-1])
            if depths.max() > MAX_DEPTH:
                raise msgspec.DecodeError(f"nested more than {MAX_DEPTH} deep")
        self._position = end
        return self._end()

    def _is_within_string(self, data: NDArray[np.uint8]) -> bool:
        """Whether a slice is a part of a string without escapes, and begins with no part of one."""
        is_plain = bool(self._inside) and not self._escaped and self._expected_half < 0
        return is_plain and not ((data == _QUOTE) | (data == _BACKSLASH)).any()

    def _end(self) -> bool:
        """Whether that was the last slice."""
        if self._position < self._bytes.size:
            return False
        if self._bounds is None or self._inside:
            raise msgspec.DecodeError("Input data was truncated")
        first, last = self._bounds
        size = self._bytes.size
        if self._skip(0, first) < first or self._skip(last + 1, size) < size:
            raise msgspec.DecodeError("JSON is malformed: invalid character")
        return True

    def list_members(self) -> dict[str, msgspec.Raw]:
        """The members of an object; of duplicate keys, the last. Raises msgspec.DecodeError."""
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

    def locate_elements(self) -> "LocatedElements":
        """The elements of a list, found when they are accessed. Raises msgspec.DecodeError."""
        first, last = self._delimit(b"[")
        if self._colons:
            raise msgspec.DecodeError("JSON is malformed: expected an element")
        if not self._commas and self._skip(first + 1, last) == last:
            return LocatedElements(self, [])
        if len(self._commas) >= self._limit:
            raise TooManyMembersError
        return LocatedElements(self, [first, *self._commas, last])

    def get_element(self, before: int, end: int) -> msgspec.Raw:
        """The element between a comma, or bracket, and the next. Raises msgspec.DecodeError."""
        start = self._skip(before + 1, end)
        if start == end:
            raise msgspec.DecodeError("JSON is malformed: expected an element")
        return msgspec.Raw(self._text[start:end])

    def _skip(self, start: int, end: int) -> int:
        """The position of the first character that is not white space, or `end`."""
        if start < end and self._bytes[start] > _SPACE[0]:
            return start
        text = bytes(self._text[start : min(start + MAX_SPACE_BYTES, end)])
        position = start + len(text) - len(text.lstrip(_SPACE))
        if position == start + MAX_SPACE_BYTES:
            raise msgspec.DecodeError(f"more than {MAX_SPACE_BYTES} bytes of white space")
        return position

    def _find_outside(self, data: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Mask of the bytes outside strings; closing quotes are outside, opening ones inside."""
        quotes = data == _QUOTE
        slashes = data == _BACKSLASH
        if self._escaped or self._expected_half >= 0 or slashes.any():
            # The number of backslashes before a byte: its distance from the last other byte.
            positions = np.arange(data.size, dtype=np.int32)
            others = np.maximum.accumulate(np.where(slashes, np.int32(-1), positions))
            run = positions - others
            run[others < 0] += self._escaped
            quotes[1:] &= (run[:-1] & 1) == 0
            quotes[0] &= not self._escaped
            self._escaped = bool(run[-1] & 1)
            self._check_surrogates(slashes, run)
        inside = np.bitwise_xor.accumulate(quotes.view(np.uint8)) ^ self._inside
        self._inside = inside[-1]
        outside: NDArray[np.bool_] = inside == 0
        return outside

    def _check_surrogates(self, slashes: NDArray[np.bool_], run: NDArray[np.int32]) -> None:
        """Check that each escape of a surrogate is half of a pair. `slashes`: this slice's
        backslashes; `run`: how many end at each byte. Raises msgspec.DecodeError."""
        start, size = self._position, slashes.size
        data = self._bytes[start : start + size + 3]
        size = max(0, min(size, data.size - 3))
        escapes = slashes[:size] & (data[1 : size + 1] == _U)
        escapes &= (data[2 : size + 2] | 0x20) == _D
        found = np.flatnonzero(escapes)
        found = found[(run[found] & 1) == 1]
        halves = _SURROGATES[data[found + 3]]
        expected = found[halves == _HIGH] + (start + _PAIR_BYTES)
        if self._expected_half >= 0:
            expected = np.concatenate(([self._expected_half], expected))
        is_later = expected >= start + slashes.size
        if not np.array_equal(found[halves == _LOW] + start, expected[~is_later]):
            raise msgspec.DecodeError("invalid utf-16 surrogate pair")
        self._expected_half = int(expected[-1]) if is_later.any() else -1

    def _record(
        self, positions: NDArray[np.int64], kinds: NDArray[np.int8], depths: NDArray[np.int32]
    ) -> None:
        """Record the delimiters of the outermost level; arrays: one entry per delimiter."""
        if self._start < 0:
            self._start = int(positions[0])
            if kinds[0] != _OPEN:
                raise msgspec.DecodeError("JSON is malformed: expected an object or a list")
        (ends,) = np.nonzero(depths <= 0)
        if self._bounds is not None or (ends.size and ends[0] != depths.size - 1):
            raise msgspec.DecodeError("JSON is malformed: trailing characters")
        if ends.size:
            self._bounds = self._start, int(positions[-1])
        outermost = depths == 1
        for kind, recorded in ((_COMMA, self._commas), (_COLON, self._colons)):
            delimiters = positions[outermost & (kinds == kind)]
            if len(recorded) + delimiters.size > self._limit:
                raise TooManyMembersError
            recorded += delimiters.tolist()

    def _delimit(self, bracket: bytes) -> tuple[int, int]:
        """Positions of the outermost brackets. Raises DecodeError if they are not `bracket`."""
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


class LocatedElements(Sequence[msgspec.Raw]):
    """The elements of a large list; objects for all of them at once would take too much memory."""

    def __init__(self, scanner: MemberScanner, bounds: list[int]) -> None:
        """`bounds`: positions of the brackets, and of the commas between them."""
        self._scanner = scanner
        self._bounds = bounds

    def __len__(self) -> int:
        return max(len(self._bounds) - 1, 0)

    def __getitem__(self, number: int) -> msgspec.Raw:  # type: ignore[override]
        if number >= len(self):
            raise IndexError(number)
        return self._scanner.get_element(self._bounds[number], self._bounds[number + 1])


def scan_members(
    text: bytes | bytearray | memoryview | msgspec.Raw, limit: int
) -> Steps[dict[str, msgspec.Raw]]:
    """The members of a large object; of duplicate keys, the last. Raises TooManyMembersError above
    `limit` members, and msgspec's errors when it is not a JSON object."""
    scanner = MemberScanner(text, limit)
    while not scanner.step():
        yield
    return scanner.list_members()


def scan_elements(text: msgspec.Raw, limit: int) -> Steps[list[msgspec.Raw]]:
    """The elements of a large list; raises as `scan_members`."""
    scanner = MemberScanner(text, limit)
    while not scanner.step():
        yield
    return scanner.list_elements()


def locate_elements(text: msgspec.Raw, limit: int) -> Steps[LocatedElements]:
    """The elements of a large list, found when they are accessed; raises as `scan_members`, and
    msgspec.DecodeError when an element is accessed that is missing."""
    scanner = MemberScanner(text, limit)
    while not scanner.step():
        yield
    return scanner.locate_elements()
