"""Batches writes: the data of one event loop iteration is sent together. Shared by all connections.

What is hard: waking a process that waits for bytes costs the kernel as much as moving them, and a
peer on the same machine sleeps again before the next token comes ten microseconds later. If writes
follow each other directly, the peer is still awake. A connection must not be closed before its
pending data is sent.
"""

import asyncio
from collections.abc import Callable

AT_ONCE = 32
"""Pieces per batch; with more, the first one would wait too long."""


def _do_soon(work: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_soon(work)


class Outbox:
    """Pending writes of one process."""

    def __init__(self, do_later: Callable[[Callable[[], None]], object] = _do_soon) -> None:
        """`do_later`: schedules a function for the end of this event loop iteration."""
        self._do_later = do_later
        self._posted: list[tuple[asyncio.Transport, bytes]] = []

    def post(self, transport: asyncio.Transport, data: bytes) -> None:
        """Send data at the end of this event loop iteration at the latest."""
        posted = self._posted
        posted.append((transport, data))
        count = len(posted)
        if count == 1:
            self._do_later(self.flush)
        elif count == AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Send everything pending, in order; data for closed connections is dropped."""
        posted, self._posted = self._posted, []
        for transport, data in posted:
            if not transport.is_closing():
                transport.write(data)
