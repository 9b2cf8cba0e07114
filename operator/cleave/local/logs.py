"""Pods' log files: bounded in size, read from their end.

The kubelet bounds them, `cleave logs` and the progress display read them. Processes write straight
to their file, so that they can go on writing while they drain after the kubelet died. That rules
out renaming; a full file is copied aside and cut to nothing instead (writers append).
"""

import shutil
from pathlib import Path

LIMIT_BYTES = 16 * 2**20
_WINDOW_BYTES = 64 * 1024


def bound(log: Path, limit_bytes: int = LIMIT_BYTES) -> None:
    """Move the text of `log` to `log`.1 when it is longer than `limit_bytes`."""
    try:
        if log.stat().st_size <= limit_bytes:
            return
    except FileNotFoundError:
        return
    aside = log.with_name(log.name + ".1")
    try:
        shutil.copyfile(log, aside)
    except OSError:
        # The disk is full: dropping the text makes room.
        aside.unlink(missing_ok=True)
    with log.open("r+b") as file:
        file.truncate(0)


def tail(log: Path, lines: int) -> list[str]:
    """The last `lines` lines that are not empty; none when there is no log yet."""
    found: list[str] = []
    window = 0
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            while len(found) < lines and window < size:
                window = min(size, 4 * window or _WINDOW_BYTES)
                file.seek(size - window)
                text = file.read(window)
                whole = text if window == size else text.partition(b"\n")[2]
                found = [line.rstrip() for line in _lines(whole) if line.strip()]
    except FileNotFoundError:
        return []
    return found[len(found) - lines :] if len(found) > lines else found


def _lines(text: bytes) -> list[str]:
    return text.decode(errors="replace").splitlines()
