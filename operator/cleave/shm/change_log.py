"""A change log of the processes of one gateway, in shared memory.

Created and inherited together with a shared table; read by the router's shared boards, which so
process only the rows that have changed. What is hard: writers do not wait for readers, so a reader
may find its next entries overwritten; then it must assume that all rows have changed.
"""

import mmap

LENGTH = 4_096
"""Entries of each process before its first one is overwritten."""
_CELL_BYTES = 8
_HEAD = 8
"""Cells before the entries of a process: one cache line, of which the first cell is the counter."""
_PART = _HEAD + LENGTH


class SharedLog:
    """The log as one process uses it; each process writes to its own part."""

    __slots__ = ("_at", "_cells", "_count", "_process", "_processes")

    def __init__(self, cells: "memoryview[int]", processes: int, process: int) -> None:
        """`cells`: the shared memory that `make_log` allocates."""
        self._cells, self._processes, self._process = cells, processes, process
        self._at = process * _PART
        self._count = cells[self._at] if process < processes else 0

    def seen_by(self, process: int) -> "SharedLog":
        """The same log for another process."""
        return SharedLog(self._cells, self._processes, process)

    def note(self, number: int) -> None:
        """Append an entry for row `number`, whose cells must already have been written."""
        cells, at, count = self._cells, self._at, self._count
        cells[at + _HEAD + count % LENGTH] = number
        cells[at] = self._count = count + 1

    def forget(self, process: int) -> None:
        """A process has died: make readers assume that all rows have changed."""
        self._cells[process * _PART] += LENGTH + 1

    def follow(self) -> "Follower":
        """A reader of the entries of all other processes from now on."""
        peers = (each for each in range(self._processes) if each != self._process)
        return Follower(self._cells, [each * _PART for each in peers])


class Follower:
    """Reads the entries of all other processes."""

    __slots__ = ("_at", "_cells", "_seen")

    def __init__(self, cells: "memoryview[int]", at: list[int]) -> None:
        self._cells, self._at = cells, at
        self._seen = [cells[each] for each in at]

    def take(self, into: set[int], most: int) -> bool:
        """Add the new entries to `into`; False: a process wrote more than `most`, so process all
        rows."""
        cells, counts, is_complete = self._cells, self._seen, True
        for index, at in enumerate(self._at):
            count = cells[at]
            first = counts[index]
            if count == first:
                continue
            counts[index] = count
            if count - first > min(most, LENGTH):
                is_complete = False
                continue
            for each in range(first, count):
                into.add(cells[at + _HEAD + each % LENGTH])
        return is_complete


def make_log(processes: int) -> SharedLog:
    """The log of `processes` processes, created by their parent before it forks them."""
    memory = mmap.mmap(-1, _CELL_BYTES * processes * _PART)
    return SharedLog(memoryview(memory).cast("q"), processes, processes)
