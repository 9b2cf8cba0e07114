"""A few numbers in a memory-mapped file that one process writes and others read.

The load page and the terms page are made of it. What is hard: reader and writer share no lock, so a
sequence number is odd while a write is under way and the reader tries again (a seqlock).
"""

import mmap
import os
import struct
from pathlib import Path
from typing import Any

_SEQUENCE = struct.Struct("<Q")
_READ_ATTEMPTS = 100


class Page:
    """One page, opened for writing or reading; its file is made when it is not there."""

    def __init__(self, path: Path, body: struct.Struct) -> None:
        self._body = body
        size = _SEQUENCE.size + body.size
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size < size:
                os.ftruncate(fd, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)

    @property
    def version(self) -> int:
        """Another one after each write; 0: nothing was written yet."""
        version: int = _SEQUENCE.unpack_from(self._map)[0]
        return version

    def write(self, *values: float) -> None:
        """Store the numbers, all at once."""
        (sequence,) = _SEQUENCE.unpack_from(self._map)
        # An odd number left by a writer that died would stay odd for ever: round up first.
        sequence += sequence & 1
        _SEQUENCE.pack_into(self._map, 0, sequence + 1)
        self._body.pack_into(self._map, _SEQUENCE.size, *values)
        _SEQUENCE.pack_into(self._map, 0, sequence + 2)

    def read(self) -> tuple[Any, ...] | None:
        """The newest whole numbers; None when none can be had."""
        for _ in range(_READ_ATTEMPTS):
            (before,) = _SEQUENCE.unpack_from(self._map)
            values = self._body.unpack_from(self._map, _SEQUENCE.size)
            (after,) = _SEQUENCE.unpack_from(self._map)
            if before == after and not before & 1:
                return values
        return None

    def close(self) -> None:
        """Unmap the page; the file stays."""
        self._map.close()
