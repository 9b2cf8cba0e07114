"""Batches writes: the data of one event loop iteration is sent together. Shared by all connections.

What is hard: waking a waiting process costs the kernel as much as copying the data, and a peer on
the same machine sleeps again before the next token arrives ten microseconds later. If writes
follow each other directly, the peer is still awake. A connection must not be closed before its
pending data is sent.
"""

import asyncio
from collections.abc import Callable

from cleave.gateway.event_loop_faults import end_after

MAX_BATCH = 32
"""Pieces per batch; with more, the first one would wait too long."""


def _call_soon(work: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_soon(work)


class WriteBatcher:
    """Pending writes of one process."""

    def __init__(self, schedule: Callable[[Callable[[], None]], object] = _call_soon) -> None:
        """`schedule`: schedules a function for the end of this event loop iteration."""
        self._schedule = schedule
        self._pending: list[tuple[asyncio.Transport, bytes | memoryview]] = []

    def write(self, transport: asyncio.Transport, data: bytes | memoryview) -> None:
        """Send data at the end of this event loop iteration at the latest."""
        pending = self._pending
        pending.append((transport, data))
        count = len(pending)
        if count == 1:
            self._schedule(self.flush)
        elif count == MAX_BATCH:
            self.flush()

    def flush(self) -> None:
        """Send everything pending, in order; data for closed connections is dropped."""
        pending, self._pending = self._pending, []
        for transport, data in pending:
            if not transport.is_closing():
                try:
                    transport.write(data)
                except Exception as error:  # noqa: BLE001 - as `contain`, without a call
                    end_after(error, transport.abort)
