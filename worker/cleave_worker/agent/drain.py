"""Decides when a draining engine is empty.

Called by the agent after SIGTERM or a Drain call. A prefill engine may have finished every request
and still lease KV that a decode engine has not pulled yet; ending it then costs those requests a
second prefill. Leased blocks show as KV usage (cached prefixes do not: they are free for reuse),
and vLLM keeps stepping, and so reporting, while leases are open. An engine is empty when for the
whole quiet period nothing runs, waits or is leased; requests that a gateway sent before it learned
of the drain arrive within that period. A handoff that is never pulled delays the drain until its
lease or the time-out ends.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from cleave.shm.load_page import LoadSnapshot


@dataclass(frozen=True, slots=True)
class DrainResult:
    """How a drain ended."""

    is_empty: bool
    num_remaining: int
    """Requests still running or waiting at the time-out."""


def is_idle(load: LoadSnapshot) -> bool:
    """Return whether ending the engine now loses no request and no leased KV."""
    return not load.num_running and not load.num_waiting and load.kv_cache_usage <= 0.0


async def drain(
    read: Callable[[], LoadSnapshot], seconds: float, quiet: float, poll: float
) -> DrainResult:
    """Wait until the engine has been idle for `quiet` seconds, at most `seconds`."""
    clock = asyncio.get_running_loop().time
    deadline = clock() + seconds
    idle_since: float | None = None
    while True:
        load, now = read(), clock()
        if not is_idle(load):
            idle_since = None
        elif idle_since is None:
            idle_since = now
        if idle_since is not None and now - idle_since >= quiet:
            return DrainResult(is_empty=True, num_remaining=0)
        if now >= deadline:
            return DrainResult(is_idle(load), load.num_running + load.num_waiting)
        await asyncio.sleep(poll)
