"""A page: a few numbers in a memory-mapped file that one process writes and others read.

The basis of the load page and the config page. What is hard: reader and writer share no lock, so a
sequence number is odd during a write and the reader then tries again (a seqlock).
"""

import mmap
import os
import struct
from pathlib import Path
from typing import Any

_SEQUENCE = struct.Struct("<Q")
_READ_ATTEMPTS = 100


class Page:
    """One page, opened for writing or reading; a missing file is created."""

    def __init__(self, path: Path, body: struct.Struct) -> None:
        """Raises OSError when the file cannot be created, also for want of room: a mapped file
        without blocks would end the process with SIGBUS at its first write to a full disk."""
        self._body = body
        size = _SEQUENCE.size + body.size
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size < size:
                os.posix_fallocate(fd, 0, size)
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)

    @property
    def version(self) -> int:
        """A number that changes with each write; 0: nothing has been written."""
        version: int = _SEQUENCE.unpack_from(self._map)[0]
        return version

    def write(self, *values: float) -> None:
        """Store the numbers, all at once."""
        (sequence,) = _SEQUENCE.unpack_from(self._map)
        # A writer that died may have left an odd number: round up to an even one first.
        sequence += sequence & 1
        _SEQUENCE.pack_into(self._map, 0, sequence + 1)
        self._body.pack_into(self._map, _SEQUENCE.size, *values)
        _SEQUENCE.pack_into(self._map, 0, sequence + 2)

    def read(self) -> tuple[Any, ...] | None:
        """The latest consistent numbers; None when none can be read in 100 attempts."""
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
