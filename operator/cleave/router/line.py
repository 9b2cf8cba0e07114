"""The scores of a board's instances for one use. Entered by the board, compared by the chooser.

What is hard: for a request a few instances are scored and all are looked through, and a single
number that goes into an array, or comes out of it, costs as much as a short list altogether. So
few are kept in a list and many in an array.
"""

import math

import numpy as np

from cleave.policy.dispatch import NONE, Scores, find_least

_INF = math.inf


class Line:
    """Scores by slot, +inf where the instance is closed for this use.

    No protocol: compiled, those take three times as long.
    """

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size
        """Slots; 0: no instance is open."""

    def enter(self, slot: int, score: float) -> None:
        """Note one score."""
        raise NotImplementedError

    def find(self, slot: int) -> float:
        """One score."""
        raise NotImplementedError

    def find_least(self) -> int:
        """Slot with the lowest score; NONE when all are closed."""
        raise NotImplementedError

    def to_list(self) -> list[float]:
        """All of them, to be read."""
        raise NotImplementedError

    def to_array(self) -> Scores:
        """All of them, to be read."""
        raise NotImplementedError


class ShortLine(Line):
    """In a list: single scores are cheap."""

    __slots__ = ("_scores",)

    def __init__(self, size: int, score: float = _INF) -> None:
        """All with this score."""
        super().__init__(size)
        self._scores = [score] * size

    def enter(self, slot: int, score: float) -> None:
        """Note one score."""
        self._scores[slot] = score

    def find(self, slot: int) -> float:
        """One score."""
        return self._scores[slot]

    def find_least(self) -> int:
        """Slot with the lowest score; NONE when all are closed."""
        least, slot = _INF, NONE
        for at, score in enumerate(self._scores):
            if score < least:
                least, slot = score, at
        return slot

    def to_list(self) -> list[float]:
        """The scores themselves."""
        return self._scores

    def to_array(self) -> Scores:
        """A copy."""
        return np.array(self._scores)


class LongLine(Line):
    """In an array: all at once are cheap."""

    __slots__ = ("_cells", "_scores")

    def __init__(self, scores: Scores) -> None:
        """These scores."""
        super().__init__(scores.size)
        self._scores = scores
        self._cells: memoryview[float] = scores.data.cast("B").cast("d")

    def enter(self, slot: int, score: float) -> None:
        """Note one score."""
        self._cells[slot] = score

    def find(self, slot: int) -> float:
        """One score."""
        return self._cells[slot]

    def find_least(self) -> int:
        """Slot with the lowest score; NONE when all are closed."""
        return find_least(self._scores)

    def to_list(self) -> list[float]:
        """A copy."""
        scores: list[float] = self._scores.tolist()
        return scores

    def to_array(self) -> Scores:
        """The scores themselves."""
        return self._scores
