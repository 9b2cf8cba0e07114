"""Hooks of all test runs: one that hangs after its last test ends, garbage collection costs no
time, and of several processes one imports vLLM.

`timeout` in pyproject.toml ends a test that waits in Python, `faulthandler_timeout` one that hangs
in compiled code or in its cleanup.
"""

import faulthandler
import gc
import signal
from collections.abc import Iterator

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

_LEAVE_S = 120
_IMPORT_VLLM = ("tests/worker/vllm/", "tests/simulator/test_prefix_caches.py")

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


class _Scheduling(LoadFileScheduling):
    """Tests of a file run in one process, and so do all that import vLLM, which takes 8 s."""

    def _split_scope(self, nodeid: str) -> str:
        return "vLLM" if nodeid.startswith(_IMPORT_VLLM) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> _Scheduling | None:
    return _Scheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Exit after _LEAVE_S even if threads are still running. Workers of pytest-xdist finish when
    no test is left for them, and then wait for the others."""
    if not hasattr(session.config, "workerinput"):
        faulthandler.dump_traceback_later(_LEAVE_S, exit=True)
