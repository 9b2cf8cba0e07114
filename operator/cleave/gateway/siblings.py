"""What the processes of one gateway share. Made by their parent, inherited by each of them.

Books of the router, accounts of tenants, and who lives, in memory; what each process has counted,
in files, so that nothing that was ever told goes down again when a process is killed. What is hard:
whoever is asked answers for all, at once, also for one that hangs or is just being replaced; so
nobody is asked, everybody leaves word.
"""

import copy
import logging
import math
import shutil
import time
import uuid
from pathlib import Path
from typing import Self

from cleave.metrics.shared_table import SharedTable
from cleave.router.shared_books import SharedBooks, make_table

log = logging.getLogger(__name__)

MAX_TENANTS = 4_096
"""Further ones have an account in each process."""
MISSING_S = 10.0
"""A process that has not been heard for so long makes the gateway unhealthy."""

_BEAT, _UNANSWERED, _IN_FLIGHT, _PID = range(4)
_RESTARTS = 0


class Siblings:
    """All processes, as one of them sees them."""

    def __init__(self, count: int, folder: Path, parent: int = -1) -> None:
        """`folder`: for files, only ours; `parent`: reads nothing as long as the parent lives."""
        self.count = count
        self.process = count
        self.name = uuid.uuid4().hex
        """Of all together, as agents count routers."""
        self.parent = parent
        self._folder = folder
        self._has_warned = False
        """Its counts could not be written; it has been said."""
        self._books = make_table(count)
        self.accounts = SharedTable(MAX_TENANTS, count, own=1, common=2)
        """Of tenants."""
        self._vitals = SharedTable(1, count, own=4, common=1)
        self._vitals.claim(b"all")
        for process in range(count):
            self._set(process, _BEAT, time.monotonic())

    def seen_by(self, process: int) -> Self:
        """The same, for one of the processes."""
        other = copy.copy(self)
        other.process = process
        other._books = self._books.seen_by(process)
        other.accounts = self.accounts.seen_by(process)
        return other

    def open_books(self) -> SharedBooks:
        """Of the instances."""
        return SharedBooks(self._books)

    # --- what each process says of itself ---

    def begin(self, pid: int) -> None:
        """This process listens."""
        self._set(self.process, _PID, pid)

    def beat(self, now: float, unanswered: int, in_flight: int) -> None:
        """It lives; with requests that wait for their first byte, and all that are served."""
        for field, value in ((_BEAT, now), (_UNANSWERED, unanswered), (_IN_FLIGHT, in_flight)):
            self._set(self.process, field, value)

    def write_counts(self, counts: bytes) -> None:
        """All that this process and its predecessors have counted."""
        path = self._path(self.process)
        part = path.with_suffix(".part")
        try:
            part.write_bytes(counts)
            part.replace(path)
        except OSError as error:
            # A full disk must not keep anybody from being served.
            if not self._has_warned:
                log.warning("metrics of this process are not told to the others: %s", error)
            self._has_warned = True

    def clear_up(self) -> None:
        """What a parent that was killed could not take away."""
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- what it learns of all ---

    def read_counts(self, process: int) -> bytes:
        """What a process has left last; nothing at first."""
        try:
            return self._path(process).read_bytes()
        except FileNotFoundError:
            return b""

    def find_room(self, unanswered: int, limit: int) -> int:
        """How many may wait here for their first byte, until asked again.

        What is left for all is shared out evenly, so that together they about keep to the limit
        whatever clients each has. At least one may: nobody could ever be let in else.
        """
        left = max(limit - sum(self._read(_UNANSWERED)), 0.0)
        return max(unanswered + math.floor(left / self.count), 1)

    def count_in_flight(self) -> int:
        """Requests being served by all."""
        return int(sum(self._read(_IN_FLIGHT)))

    def list_pids(self) -> list[int]:
        """Of those that live and listen."""
        return [int(pid) for pid in self._read(_PID) if pid]

    def find_missing(self, now: float) -> list[tuple[int, float]]:
        """Processes that have not been heard for MISSING_S, and since how many seconds."""
        ages = [now - beat for beat in self._read(_BEAT)]
        return [(process, age) for process, age in enumerate(ages) if age > MISSING_S]

    @property
    def restarts(self) -> int:
        """Of all processes, since the start."""
        return int(self._vitals.common[0, _RESTARTS])

    # --- what only the parent does ---

    def find_beat(self, process: int) -> float:
        """When a process was heard last."""
        return self._read(_BEAT)[process]

    def forget(self, process: int) -> None:
        """A process has died: none of what it had under way is there any more."""
        self._books.forget(process)
        self.accounts.forget(process)
        for field in (_UNANSWERED, _IN_FLIGHT, _PID):
            self._set(process, field, 0.0)

    def note_restart(self) -> None:
        """Another one takes its place."""
        self._vitals.common[0, _RESTARTS] += 1

    def close(self) -> None:
        """All have ended."""
        for table in (self._books, self.accounts, self._vitals):
            table.close()

    def _read(self, field: int) -> tuple[float, ...]:
        return self._vitals.read(0, field)

    def _set(self, process: int, field: int, value: float) -> None:
        self._vitals.cells[self._vitals.cell_at(0, field, process)] = value

    def _path(self, process: int) -> Path:
        return self._folder / f"{process}.counts"
