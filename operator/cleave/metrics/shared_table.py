"""Numbers that the processes of one gateway share: rows of cells in one memory, no lock on the way.

Made by the first process, inherited by those it forks; used by the router's shared books and the
gateway's shared limits. Each row has cells of two kinds. Own cells are one per process, written by
that process alone and added up by all, so that nothing gets lost however they interleave. Common
cells are written by anybody: the last one wins, which is right for what all would write alike.
What is hard: a process may die at any moment, also while it holds a row. So whoever sees it die
clears its column, and the only lock, for finding a row, is one that the kernel takes back.
"""

import copy
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from typing import Self

import numpy as np

CELL_BYTES = 8

LOCK_S = 0.2
"""At most, for a row; its holder needs some microseconds unless it was stopped."""
_LOCK_EVERY_S = 0.0005


class SharedTable:
    """The table as one of the processes sees it; rows are claimed by key."""

    def __init__(self, rows: int, processes: int, *, own: int, common: int) -> None:
        """`own` and `common`: how many cells of each kind a row has; all begin as 0.

        Who makes it is none of the processes: rows that it claims stay for ever.
        """
        self.rows = rows
        self.process = processes
        self._own, self.processes = own, processes
        sizes = [rows * own * processes, common * rows, rows]
        self._file = os.memfd_create("cleave-shared")
        os.ftruncate(self._file, CELL_BYTES * sum(sizes) + rows * (processes + 1))
        self.memory = mmap.mmap(self._file, 0)
        end = np.cumsum(sizes)
        cells = np.frombuffer(self.memory, np.float64, int(end[-1]))
        self._columns = cells[: end[0]].reshape(rows, own, processes)
        self.common = cells[end[0] : end[1]].reshape(common, rows)
        """Common cells by field and row."""
        self._common_start = int(end[0])
        self._keys = cells[end[1] :].view(np.uint64)
        held = np.frombuffer(self.memory, np.uint8, offset=CELL_BYTES * int(end[-1]))
        self._held = held.reshape(rows, processes + 1)
        self.cells = memoryview(self.memory)[: CELL_BYTES * int(end[-1])].cast("d")
        """Every cell, at `own_at` and `common_at`: a tenth of what arrays take for a single one."""
        self.unpack = struct.Struct(f"{processes}d").unpack_from

    def seen_by(self, process: int) -> Self:
        """The same table for another process."""
        other = copy.copy(self)
        other.process = process
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
        self._columns[row, :, self.process] = 0.0
        self._held[row, self.process] = 0

    def forget(self, process: int) -> None:
        """Clear what a process that has died has left in every row."""
        self._columns[:, :, process] = 0.0
        self._held[:, process] = 0

    def own_at(self, row: int, field: int) -> int:
        """Where in `cells` this process writes."""
        return self.column_at(row, field) + self.process

    def column_at(self, row: int, field: int) -> int:
        """Where in `cells` the cells of all processes begin."""
        return (row * self._own + field) * self.processes

    def common_at(self, row: int, field: int) -> int:
        """Where in `cells` all write."""
        return self._common_start + field * self.rows + row

    def read(self, row: int, field: int) -> tuple[float, ...]:
        """The own cells of all processes."""
        values: tuple[float, ...] = self.unpack(
            self.memory, CELL_BYTES * self.column_at(row, field)
        )
        return values

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
        self._columns[row] = 0.0
        self.common[:, row] = 0.0
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
