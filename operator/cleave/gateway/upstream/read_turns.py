"""Large reads of engines' connections take turns: a piece of each, for a slice of the event loop.

Used by `connection_pool`. What is hard: each connection alone takes a millisecond, but hundreds may
have much to parse in the same iteration of the event loop, and all else waits for all of them. So
one slice is for all together. Small reads, which tokens of streams are, do not wait here.
"""

import asyncio
from collections import deque
from time import monotonic
from typing import Protocol

from cleave.time_slices import SLICE_S


class Reader(Protocol):
    """A connection with bytes that it has not parsed."""

    def parse_next(self) -> bool:
        """Parse a piece; whether more can be parsed now."""


class ReadTurns:
    """The readers of one process."""

    def __init__(self) -> None:
        self._waiting: deque[Reader] = deque()

    def add(self, reader: Reader) -> None:
        """Let a reader take turns until nothing more of it can be parsed."""
        self._waiting.append(reader)
        if len(self._waiting) == 1:
            self._schedule()

    def _schedule(self) -> None:
        asyncio.get_running_loop().call_soon(self._run_slice)

    def _run_slice(self) -> None:
        waiting, slice_ends_at = self._waiting, monotonic() + SLICE_S
        try:
            while waiting and monotonic() < slice_ends_at:
                # It stays in the queue meanwhile, so that `add` does not schedule again.
                if waiting[0].parse_next():
                    waiting.rotate(-1)
                else:
                    waiting.popleft()
        except BaseException:
            waiting.popleft()
            raise
        finally:
            if waiting:
                self._schedule()
