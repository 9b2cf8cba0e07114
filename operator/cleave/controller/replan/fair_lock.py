"""A lock whose waiters take turns by group. Used by the client of the planner.

With a plain lock one namespace with a thousand deployments would hold up the plans of all others.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class FairLock:
    """One holder at a time. Each group that waits gets one turn before any gets a second one."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """In the order of their next turns."""

    def has_other_waiters(self, group: str) -> bool:
        """Whether another group than `group` waits."""
        return any(
            other != group and any(not waiter.done() for waiter in waiters)
            for other, waiters in self._waiting.items()
        )

    @asynccontextmanager
    async def acquire(self, group: str) -> AsyncIterator[None]:
        """Acquire the lock, after waiting for a turn of `group`, and release it afterwards."""
        if self._is_held:
            await self._wait(group)
        self._is_held = True
        try:
            yield
        finally:
            self._release()

    async def _wait(self, group: str) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group, deque()).append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled():
                # It had its turn already.
                self._release()
            raise

    def _release(self) -> None:
        for group in tuple(self._waiting):
            waiters = self._waiting.pop(group)
            while waiters:
                waiter = waiters.popleft()
                if not waiter.done():
                    if waiters:
                        self._waiting[group] = waiters
                    waiter.set_result(None)
                    return
        self._is_held = False
