"""Pods' log files: bounded in size, read from their end.

The kubelet bounds them, `cleave logs` and the progress display read them. Processes write straight
to their file, so that they can go on writing while they drain after the kubelet died. That rules
out renaming; a full file is copied aside and cut to nothing instead (writers append).
"""

import shutil
from pathlib import Path

LIMIT_BYTES = 16 * 2**20
_TAIL_BYTES = 64 * 1024


def bound(log: Path, limit_bytes: int = LIMIT_BYTES) -> None:
    """Move the text of `log` to `log`.1 when it is longer than `limit_bytes`."""
    try:
        if log.stat().st_size <= limit_bytes:
            return
    except FileNotFoundError:
        return
    shutil.copyfile(log, log.with_name(log.name + ".1"))
    with log.open("r+b") as file:
        file.truncate(0)


def tail(log: Path, lines: int) -> list[str]:
    """The last `lines` lines that are not empty; none when there is no log yet."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-lines:]
