"""What can go wrong while an engine is measured; the command line tells it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ProfilingError(RuntimeError):
    """The engine could not be measured; one line that says why and what to do."""


@asynccontextmanager
async def single_fault() -> AsyncIterator[None]:
    """Lets the first ProfilingError of a task group out by itself."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise _first(group) or group from None


def _first(error: BaseException) -> ProfilingError | None:
    if isinstance(error, ProfilingError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_first, error.exceptions)), None)
    return None
