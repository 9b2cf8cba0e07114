"""Hooks of all test runs: one that hangs after its last test ends, and neither reruns nor garbage
collection cost time.

`timeout` in pyproject.toml ends a test that waits in Python, `faulthandler_timeout` one that hangs
in compiled code or in its cleanup.
"""

import faulthandler
import gc
import signal
import socket
from collections.abc import Iterator

import pytest

_LEAVE_S = 120

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


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Send each message of pytest-rerunfailures at once.

    With pytest-xdist, its processes count reruns over TCP. Two short messages in a row, as before
    each test, otherwise wait 40 ms for an acknowledgement.
    """
    connection = getattr(getattr(config, "failures_db", None), "sock", None)
    if connection is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
