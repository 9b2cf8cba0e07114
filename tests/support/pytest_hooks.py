"""Hooks of all test runs: one that hangs after its last test ends, and neither garbage collection
nor the certificates of public servers cost time.

`timeout` in pyproject.toml ends a test that waits in Python, `faulthandler_timeout` one that hangs
in compiled code or in its cleanup.
"""

import faulthandler
import functools
import gc
import signal
from collections.abc import Iterator

import httpx._transports.default as transport
import pytest

_LEAVE_S = 120

# `httpx.get` and its like read all certificates each time: 30 ms of processor time.
transport.create_ssl_context = functools.cache(transport.create_ssl_context)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As under nohup. Child processes of tests would inherit it and ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep modules and tests from garbage collection: they stay to the end, and are a million
    objects, which each full collection would look through, now and between tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Exit after _LEAVE_S even if threads are still running. Workers of pytest-xdist finish when
    no test is left for them, and then wait for the others."""
    if not hasattr(session.config, "workerinput"):
        faulthandler.dump_traceback_later(_LEAVE_S, exit=True)
