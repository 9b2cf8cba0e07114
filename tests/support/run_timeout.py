"""A run of tests ends, whatever hangs in it.

`timeout` of pyproject ends a test that waits in Python, `faulthandler_timeout` one that hangs in
compiled code or in what clears up after it; this, what hangs when all tests are over.
"""

import faulthandler
import signal

_LEAVE_S = 120

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As under nohup. What tests start would inherit it, and end by no SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionfinish() -> None:
    """Threads that nobody waits for any more may not keep the process."""
    faulthandler.dump_traceback_later(_LEAVE_S, exit=True)
