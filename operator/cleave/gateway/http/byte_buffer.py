"""Bytes that are collected without being copied: bodies that arrive, JSON that is written.

A bytearray that grows is copied now and then; copying 16 MiB into new memory takes 4 to 14 ms, most
of it page faults. So long ones lie in memory of their own, whose pages the kernel moves when it
grows. It takes them back when nothing refers to them, which takes 2 ms for 16 MiB, in the middle of
anything: so the event loop gives them back a piece at a time.
"""

import asyncio
import mmap
from contextlib import suppress

MAPPED_BYTES = 512 << 10
"""More bytes lie in memory of their own."""
GIVEN_BACK_BYTES = 1 << 20
"""Given back at a time, in 0.15 ms."""


class _Map(mmap.mmap):
    def __del__(self) -> None:
        # Without an event loop it is given back at once.
        with suppress(RuntimeError):
            loop = asyncio.get_running_loop()
            loop.call_soon(_shrink, self, loop)


class ByteBuffer:
    """`add`, then `take` once."""

    __slots__ = ("_map", "_short", "_size")

    def __init__(self, begin: bytes = b"") -> None:
        self._short = bytearray(begin)
        self._map: _Map | None = None
        """None: all is in `_short`."""
        self._size = 0
        """Of what is in the map."""

    def __len__(self) -> int:
        return self._size or len(self._short)

    def add(self, data: bytes | memoryview) -> None:
        """Append some bytes."""
        if self._map is None and len(self._short) + len(data) <= MAPPED_BYTES:
            self._short += data
            return
        end = len(self) + len(data)
        if self._map is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            self._map = _Map(-1, max(end, 2 * MAPPED_BYTES), flags=flags)
            self._map[: len(self._short)] = bytes(self._short)
        elif end > len(self._map):
            self._map.resize(max(end, 2 * len(self._map)))
        self._map[end - len(data) : end] = data
        self._size = end

    def drop_last(self) -> None:
        """Drop the last byte."""
        if self._map is None:
            self._short.pop()
        else:
            self._size -= 1

    def take(self) -> bytearray | memoryview:
        """What was appended; nothing more can be."""
        return self._short if self._map is None else memoryview(self._map)[: self._size]


def _shrink(pages: _Map, loop: asyncio.AbstractEventLoop) -> None:
    """Give a piece back, and the others later; the last one goes with the reference."""
    if len(pages) > GIVEN_BACK_BYTES:
        pages.resize(len(pages) - GIVEN_BACK_BYTES)
        loop.call_soon(_shrink, pages, loop)
