"""Recorded requests, read from a file: what really arrived, and how long it was.

Called for `spec.workload.trace` and by `cleave workload`.
"""

from pathlib import Path

from cleave.simulator.trace import Trace


class HistoryError(ValueError):
    """The recording cannot be used; one line that names file, line, value and remedy."""


def read(path: Path) -> Trace:
    """The requests in `path`, from the first one's arrival on. Raises HistoryError."""
    raise HistoryError(f"{path}: cannot be read yet")
