"""Numbers that the processes of one gateway share: rows of cells in one memory, no lock on the way.

Made by the first process, inherited by those it forks; used by the router's shared books and the
gateway's shared limits. Each row has own cells for each process, written by that process alone and
added up by all, so that nothing gets lost however they interleave, and common cells that anybody
writes: the last one wins, which is right for what all would write alike.
What is hard: a process may die at any moment, also while it holds a row. So whoever sees it die
clears its cells, and the only lock, for finding a row, is one that the kernel takes back. And what
one core writes another fetches by the line, at a tenth of a microsecond each: a row is one piece.
"""

import copy
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Self

import numpy as np

from cleave.metrics.shared_log import make_log

CELL_BYTES = 8
_LINE = 8
"""Cells that cores fetch together; rows begin on one."""

LOCK_S = 0.2
"""At most, for a row; its holder needs some microseconds unless it was stopped."""
_LOCK_EVERY_S = 0.0005


class SharedTable:
    """The table as one of the processes sees it; rows are claimed by key."""

    def __init__(self, rows: int, processes: int, *, own: int, common: int) -> None:
        """`own` and `common`: how many cells of each kind a row has; all begin as 0.

        Who makes it is none of the processes: rows that it claims stay for ever.
        """
        self.process = processes
        self._own, self.processes = own, processes
        self._width = -(-(own * processes + common) // _LINE) * _LINE
        num_cells = rows * self._width
        self._file = os.memfd_create("cleave-shared")
        os.ftruncate(self._file, CELL_BYTES * (num_cells + rows) + rows * (processes + 1))
        self.memory = mmap.mmap(self._file, 0)
        table = np.frombuffer(self.memory, np.float64, num_cells).reshape(rows, self._width)
        self._owned = table[:, : own * processes].reshape(rows, own, processes)
        self.common = table[:, own * processes : own * processes + common]
        """Common cells by row and field."""
        self._keys = np.frombuffer(self.memory, np.uint64, rows, CELL_BYTES * num_cells)
        held = np.frombuffer(self.memory, np.uint8, offset=CELL_BYTES * (num_cells + rows))
        self._held = held.reshape(rows, processes + 1)
        self.cells = memoryview(self.memory)[: CELL_BYTES * num_cells].cast("d")
        """Every cell, at `own_at` and `common_at`: a tenth of what arrays take for a single one."""
        self.log = make_log(processes)
        """Rows that have changed, where somebody wants to know."""

    def seen_by(self, process: int) -> Self:
        """The same table for another process."""
        other = copy.copy(self)
        other.process, other.log = process, self.log.seen_by(process)
        return other

    def claim(self, key: bytes) -> int | None:
        """The row of this key, the same in all processes; None: there is none left."""
        number = int.from_bytes(blake2b(key, digest_size=8).digest(), "little") or 1
        try:
            with self._locked():
                row = self._find(number)
                if row is not None:
                    self._held[row, self.process] = 1
                return row
        except TimeoutError:
            return None

    def release(self, row: int) -> None:
        """This process needs a row no more; without anybody it is free for another key."""
        self._owned[row, :, self.process] = 0.0
        self._held[row, self.process] = 0

    def forget(self, process: int) -> None:
        """Clear what a process that has died has left in every row."""
        self._owned[:, :, process] = 0.0
        self._held[:, process] = 0
        self.log.forget(process)

    def own_at(self, row: int, field: int) -> int:
        """Where in `cells` this process writes."""
        return self.cell_at(row, field, self.process)

    def cell_at(self, row: int, field: int, process: int) -> int:
        """Where in `cells` a process writes; next come the other processes, then the next field."""
        return row * self._width + field * self.processes + process

    def common_at(self, row: int, field: int) -> int:
        """Where in `cells` all write; behind the last own one."""
        return self.cell_at(row, self._own, field)

    def read(self, row: int, field: int) -> tuple[float, ...]:
        """The own cells of all processes."""
        return tuple(self._owned[row, field].tolist())

    def close(self) -> None:
        """No more rows can be claimed; the memory goes with the last process."""
        os.close(self._file)

    def _find(self, number: int) -> int | None:
        known = np.flatnonzero(self._keys == number)
        if known.size:
            return int(known[0])
        free = np.flatnonzero(~self._held.any(axis=1))
        if not free.size:
            return None
        row = int(free[0])
        self._owned[row] = 0.0
        self.common[row] = 0.0
        self._keys[row] = number
        return row

    @contextmanager
    def _locked(self) -> Iterator[None]:
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    raise TimeoutError("the table stays locked") from None
                time.sleep(_LOCK_EVERY_S)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
