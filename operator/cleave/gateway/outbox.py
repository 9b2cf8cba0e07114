"""What is sent in one turn of the event loop, sent together. Shared by all connections.

What is hard: waking who waits for bytes costs a kernel as much as moving them, and a peer on the
same machine has slept again before the next token comes, ten microseconds later. Sent one right
after the other they find it awake. Nothing may be closed before what was posted to it is sent.
"""

import asyncio
from collections.abc import Callable

AT_ONCE = 32
"""Pieces; more of them would let the first one wait for long."""


def _do_soon(work: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_soon(work)


class Outbox:
    """Of one process."""

    def __init__(self, do_later: Callable[[Callable[[], None]], object] = _do_soon) -> None:
        """`do_later`: has something done once this turn of the event loop is over."""
        self._do_later = do_later
        self._posted: list[tuple[asyncio.Transport, bytes]] = []

    def post(self, transport: asyncio.Transport, data: bytes) -> None:
        """Send it, at the end of this turn at the latest."""
        posted = self._posted
        posted.append((transport, data))
        count = len(posted)
        if count == 1:
            self._do_later(self.flush)
        elif count == AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Send what was posted, in order; what is for a connection that was cut is dropped."""
        posted, self._posted = self._posted, []
        for transport, data in posted:
            if not transport.is_closing():
                transport.write(data)
