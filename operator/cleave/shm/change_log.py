"""A change log of the processes of one gateway, in shared memory.

Created and inherited together with a shared table; read by the router's shared score tables, so
that they process only the rows that have changed. What is hard: writers do not wait for readers, so
a reader may find its next entries overwritten; then it must assume that all rows have changed.
"""

import mmap

CAPACITY = 4_096
"""Entries of each process before its first one is overwritten."""
_CELL_BYTES = 8
_HEADER_CELLS = 8
"""Cells before the entries of a process: one cache line, of which the first cell is the counter."""
_PROCESS_CELLS = _HEADER_CELLS + CAPACITY


class ChangeLog:
    """The log as one process uses it; each process writes to its own part."""

    __slots__ = ("_cells", "_count", "_process", "_processes", "_start")

    def __init__(self, cells: "memoryview[int]", processes: int, process: int) -> None:
        """`cells`: the shared memory that `build_change_log` allocates."""
        self._cells, self._processes, self._process = cells, processes, process
        self._start = process * _PROCESS_CELLS
        self._count = cells[self._start] if process < processes else 0

    def for_process(self, process: int) -> "ChangeLog":
        """The same log for another process."""
        return ChangeLog(self._cells, self._processes, process)

    def record(self, number: int) -> None:
        """Append an entry for row `number`, whose cells must already have been written."""
        cells, start, count = self._cells, self._start, self._count
        cells[start + _HEADER_CELLS + count % CAPACITY] = number
        cells[start] = self._count = count + 1

    def invalidate_process(self, process: int) -> None:
        """A process has died: make readers assume that all rows have changed."""
        self._cells[process * _PROCESS_CELLS] += CAPACITY + 1

    def open_reader(self) -> "ChangeLogReader":
        """A reader of the entries of all other processes from now on."""
        peers = (each for each in range(self._processes) if each != self._process)
        return ChangeLogReader(self._cells, [each * _PROCESS_CELLS for each in peers])


class ChangeLogReader:
    """Reads the entries of all other processes."""

    __slots__ = ("_cells", "_read_counts", "_starts")

    def __init__(self, cells: "memoryview[int]", starts: list[int]) -> None:
        self._cells, self._starts = cells, starts
        self._read_counts = [cells[each] for each in starts]

    def drain(self, changed: set[int], limit: int) -> bool:
        """Add new entries to `changed`; False: one process wrote over `limit`, so read all rows."""
        cells, counts, is_complete = self._cells, self._read_counts, True
        for index, offset in enumerate(self._starts):
            count = cells[offset]
            first = counts[index]
            if count == first:
                continue
            counts[index] = count
            if count - first > min(limit, CAPACITY):
                is_complete = False
                continue
            for each in range(first, count):
                changed.add(cells[offset + _HEADER_CELLS + each % CAPACITY])
        return is_complete


def build_change_log(processes: int) -> ChangeLog:
    """The log of `processes` processes, created by their parent before it forks them."""
    memory = mmap.mmap(-1, _CELL_BYTES * processes * _PROCESS_CELLS)
    return ChangeLog(memoryview(memory).cast("q"), processes, processes)
