"""Hooks of all test runs: one that hangs after its last test ends, and reruns show why.

`timeout` in pyproject.toml ends a test that waits in Python, `faulthandler_timeout` one that hangs
in compiled code or in its cleanup.
"""

import faulthandler
import signal

import pytest

_LEAVE_S = 120

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As under nohup. Child processes of tests would inherit it and ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish() -> None:
    """Exit after _LEAVE_S even if threads are still running."""
    faulthandler.dump_traceback_later(_LEAVE_S, exit=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how tests failed that were run once more."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.write_sep("_", f"rerun: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
