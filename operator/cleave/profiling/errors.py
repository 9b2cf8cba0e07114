"""The error of profiling, which the command line prints."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ProfilingError(RuntimeError):
    """The engine could not be measured; the message is one line with reason and remedy."""


class BatchNotFormedError(ProfilingError):
    """A batch of decoding requests cannot be observed on this engine; smaller ones can."""


@asynccontextmanager
async def unwrap_group() -> AsyncIterator[None]:
    """Raise the first ProfilingError of a task group instead of the exception group."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise _find_first(group) or group from None


def _find_first(error: BaseException) -> ProfilingError | None:
    if isinstance(error, ProfilingError):
        return error
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_find_first, error.exceptions)), None)
    return None
