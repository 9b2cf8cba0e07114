"""An engine's answer that is not streamed, collected until it is complete.

Used by attempts. What is hard: an answer may have 64 MiB, and joining, searching or decoding it at
once would stop all other requests for up to 100 ms. So what the gateway looks for in a large answer
is found piece by piece while it arrives, and it is written to the client without being copied.
"""

import re
from collections.abc import Sequence
from typing import TypeAlias

from cleave.gateway.http.byte_buffer import ByteBuffer
from cleave.gateway.upstream.spellings import match_escapes

MAX_DECODED_BYTES = 512 << 10
"""Larger answers are not decoded as a whole: 1 MiB can take 7 ms."""
MAX_HANDOFF_BYTES = 1 << 20
"""Of a prefill engine's answer: the ids of 150,000 blocks, which take 2 ms to read."""
HANDOFF_KEY = b'"kv_transfer_params"'
USAGE_KEY = b'"usage":{'
"""As vLLM writes it. Within a text of JSON the quotes would have backslashes."""
PART_BYTES = 4 << 20
"""About what lies in one piece of memory, which is given back once a client has it."""
_ESCAPE = b"\\u00"
_ESCAPED_KEY = re.compile(b'"%b"' % match_escapes(HANDOFF_KEY.strip(b'"')))
_OVERLAP = len(HANDOFF_KEY) - 1
_ESCAPED_OVERLAP = len(HANDOFF_KEY) * len(b"\\u0000")


class CollectedAnswer:
    """`add` the pieces, then `take` the body."""

    __slots__ = (
        "_end",
        "_parts",
        "_size",
        "_views",
        "handoff_at",
        "has_escaped_key",
        "num_handoffs",
        "usage_at",
    )

    def __init__(self, first: bytes) -> None:
        self._parts = [ByteBuffer()]
        self._views: list[memoryview] = []
        """Of `_parts`, once they are taken."""
        self._size = 0
        self._end = b""
        """In which a key may begin that goes on in the next piece."""
        self.usage_at = self.handoff_at = -1
        """Where the last of these keys begins; below 0: there is none."""
        self.num_handoffs = 0
        """How often the key of a handoff occurs."""
        self.has_escaped_key = False
        """Whether it occurs with escapes, as no engine writes it."""
        self.add(first)

    def __len__(self) -> int:
        return self._size

    def add(self, piece: bytes) -> None:
        """Append a piece, and look for the keys."""
        begin, text = self._size - len(self._end), self._end + piece
        if (at := text.rfind(USAGE_KEY)) >= 0:
            self.usage_at = begin + at
        # Those that end in what came before are counted.
        start = max(len(self._end) - _OVERLAP, 0)
        if (at := text.rfind(HANDOFF_KEY, start)) >= 0:
            self.num_handoffs += text.count(HANDOFF_KEY, start)
            self.handoff_at = begin + at
        if _ESCAPE in text and any(_ESCAPE in key for key in _ESCAPED_KEY.findall(text)):
            self.has_escaped_key = True
        self._end = text[-_ESCAPED_OVERLAP:]
        if len(self._parts[-1]) >= PART_BYTES:
            self._parts.append(ByteBuffer())
        self._parts[-1].add(piece)
        self._size += len(piece)

    def take(self) -> "bytes | CollectedAnswer":
        """The body: bytes unless it is large, or hides a handoff. Nothing can be added after it."""
        if self._size <= MAX_DECODED_BYTES and not self.has_escaped_key:
            return bytes(self._parts[0].take())
        self._views = [memoryview(part.take()) for part in self._parts]
        return self

    def slice(self, begin: int, end: int) -> list[memoryview]:
        """These bytes of a large answer, in pieces; not copied."""
        pieces = []
        for view in self._views:
            pieces.append(view[max(begin, 0) : max(end, 0)])
            begin, end = begin - len(view), end - len(view)
        return pieces

    def replace(self, begin: int, end: int, value: bytes) -> None:
        """Put other bytes in the place of these, in a large answer."""
        self._views = [*self.slice(0, begin), memoryview(value), *self.slice(end, self._size)]
        growth = len(value) - (end - begin)
        self._size += growth
        if self.handoff_at >= end:
            self.handoff_at += growth

    def read(self, begin: int, end: int) -> bytes:
        """These bytes of a large answer, which are few."""
        return b"".join(self.slice(begin, end))


AnswerBody: TypeAlias = bytes | CollectedAnswer
"""Bytes that may be decoded, or a large answer."""
Pieces: TypeAlias = Sequence[bytes | memoryview]
"""What goes to the client, in pieces that follow each other."""


def join_handoff(body: AnswerBody) -> bytes | None:
    """The body of a prefill engine's answer; None: it is too long for one."""
    if isinstance(body, bytes):
        return body
    return body.read(0, len(body)) if len(body) <= MAX_HANDOFF_BYTES else None
