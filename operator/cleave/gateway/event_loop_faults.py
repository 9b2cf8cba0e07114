"""Faults of this program: each ends its own client, and is a line in the log, once a minute.

Where code of all clients calls that of one, it does so through `contain`: a fault there ends what
it serves, and the caller goes on. The event loop calls `EventLoopFaults.handle` with these and with
each other exception that a protocol, a callback or a task lets through. What is hard: a client that
finds such a fault can repeat it thousands of times a second, and tracebacks would fill the disk.
And the text of an exception may contain what the client has sent, so only its type and its places
in the code are logged.
"""

import asyncio
import logging
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

INTERVAL_S = 60.0
MAX_PLACES = 64
"""Places that are remembered; beyond, all are forgotten."""
_FRAMES = 4


def contain(end: Callable[[], None], work: Callable[..., None], *arguments: object) -> None:
    """Do what serves one client; `end`: ends that with an error after a fault."""
    try:
        work(*arguments)
    except Exception as error:  # noqa: BLE001 - of any kind
        end_after(error, end)


def end_after(error: Exception, end: Callable[[], None]) -> None:
    """Report a fault, and end what it has interrupted."""
    loop = asyncio.get_running_loop()
    loop.call_exception_handler({"exception": error})
    try:
        end()
    except Exception as second:  # noqa: BLE001 - of any kind
        loop.call_exception_handler({"exception": second})


class EventLoopFaults:
    """The faults of one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged: dict[str, tuple[float, int]] = {}
        """By description: when it was logged, and how often it has occurred since."""

    def handle(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log a fault, and close the connection that the event loop names; an exception handler."""
        error, transport = context.get("exception"), context.get("transport")
        if transport is not None:
            transport.abort()
        description = _describe(error) if error is not None else str(context.get("message"))
        now = self._clock()
        logged_at, count = self._logged.get(description, (-INTERVAL_S, 0))
        if now < logged_at + INTERVAL_S:
            self._logged[description] = logged_at, count + 1
            return
        if len(self._logged) >= MAX_PLACES:
            self._logged.clear()
        self._logged[description] = now, 0
        more = f" ({count} more since it was logged last)" if count else ""
        log.error("fault in a callback: %s%s", description, more)


def _describe(error: BaseException) -> str:
    """The type of an exception, and the innermost places in the code."""
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    places = [f"{Path(each.filename).name}:{each.lineno}" for each in reversed(frames)]
    cause = error.__cause__ or error.__context__
    text = " < ".join([type(error).__name__, *places])
    return text if cause is None else f"{text}, from {_describe(cause)}"
