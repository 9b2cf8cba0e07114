"""Log files of pods: rotation by size, and reading from the end.

The kubelet rotates them; `cleave logs` and the start-up progress read them. Processes write
directly to their file, so that they can log while they drain after the kubelet died. Renaming is
therefore impossible: a full file is copied and truncated (writers append).
"""

import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from cleave.local.kubelet import line_times

MAX_BYTES = 16 * 2**20
_WINDOW_BYTES = 64 * 1024


def rotate(log: Path, max_bytes: int = MAX_BYTES) -> None:
    """Copy `log` to `log`.1 and truncate it when it is longer than `max_bytes`."""
    try:
        if log.stat().st_size <= max_bytes:
            return
    except FileNotFoundError:
        return
    aside = _get_rotated(log)
    try:
        shutil.copyfile(log, aside)
    except OSError:
        # The disk is full: truncating without a copy frees space.
        aside.unlink(missing_ok=True)
    with log.open("r+b") as file:
        file.truncate(0)


def tail(log: Path, lines: int) -> list[str]:
    """The last `lines` non-empty lines; none when there is no log yet."""
    recent: list[str] = []
    window = 0
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            while len(recent) < lines and window < size:
                window = min(size, 4 * window or _WINDOW_BYTES)
                file.seek(size - window)
                text = file.read(window)
                complete = text if window == size else text.partition(b"\n")[2]
                ends = complete.decode(errors="replace").splitlines()
                recent = [line.rstrip() for line in ends if line.strip()]
    except FileNotFoundError:
        return []
    return recent[len(recent) - lines :] if len(recent) > lines else recent


def read_since(log: Path, since: datetime, now: datetime) -> list[str]:
    """The non-empty lines written at `since` or later, also those of the rotated file; both times
    are aware. Lines without a time stamp belong to the line before them."""
    lines = (line for file in (_get_rotated(log), log) for line in _iterate_lines(file))
    return list(line_times.select_since(lines, since, now))


def _iterate_lines(log: Path) -> Iterator[str]:
    try:
        with log.open(errors="replace") as file:
            yield from (line.rstrip() for line in file if line.strip())
    except FileNotFoundError:
        return


def _get_rotated(log: Path) -> Path:
    return log.with_name(log.name + ".1")
