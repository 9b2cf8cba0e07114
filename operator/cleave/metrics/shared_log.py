"""What each process of one gateway has changed lately, noted in memory that all share.

Made and inherited with a shared table; followed by the router's shared boards, which so look at
what has changed and at nothing else. What is hard: nobody waits for readers, so a log that has
come round is not read, and all may have changed then.
"""

import mmap

LENGTH = 4_096
"""Notes of each process before its first is written over."""
_CELL_BYTES = 8
_HEAD = 8
"""Cells before the notes, so that none is on a line with another process's. The first counts."""
_PART = _HEAD + LENGTH


class SharedLog:
    """The log as one of the processes sees it: each has its own part."""

    __slots__ = ("_at", "_cells", "_count", "_process", "_processes")

    def __init__(self, cells: "memoryview[int]", processes: int, process: int) -> None:
        """In these cells, as `make_log` makes them."""
        self._cells, self._processes, self._process = cells, processes, process
        self._at = process * _PART
        self._count = cells[self._at] if process < processes else 0

    def seen_by(self, process: int) -> "SharedLog":
        """The same log for another process."""
        return SharedLog(self._cells, self._processes, process)

    def note(self, number: int) -> None:
        """Tell the others; what is noted has been written before."""
        cells, at, count = self._cells, self._at, self._count
        cells[at + _HEAD + count % LENGTH] = number
        cells[at] = self._count = count + 1

    def forget(self, process: int) -> None:
        """A process has died: all that it wrote may have changed."""
        self._cells[process * _PART] += LENGTH + 1

    def follow(self) -> "Follower":
        """What the others note from now on."""
        others = (each for each in range(self._processes) if each != self._process)
        return Follower(self._cells, [each * _PART for each in others])


class Follower:
    """A reader of all other processes' notes."""

    __slots__ = ("_at", "_cells", "_seen")

    def __init__(self, cells: "memoryview[int]", at: list[int]) -> None:
        self._cells, self._at = cells, at
        self._seen = [cells[each] for each in at]

    def take(self, into: set[int], most: int) -> bool:
        """Add what was noted since; False: more than `most` by one process, so look at all."""
        cells, seen, is_all = self._cells, self._seen, True
        for place, at in enumerate(self._at):
            count = cells[at]
            first = seen[place]
            if count == first:
                continue
            seen[place] = count
            if count - first > min(most, LENGTH):
                is_all = False
                continue
            for each in range(first, count):
                into.add(cells[at + _HEAD + each % LENGTH])
        return is_all


def make_log(processes: int) -> SharedLog:
    """Before the processes are forked; who makes it is none of them."""
    memory = mmap.mmap(-1, _CELL_BYTES * processes * _PART)
    return SharedLog(memoryview(memory).cast("q"), processes, processes)
