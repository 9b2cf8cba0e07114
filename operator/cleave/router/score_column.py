"""Columns of scores by slot. `ScoreTable` sets the scores, `policy` compares them.

What is hard: each request changes the scores of a few instances and reads those of all, and setting
or reading one element of a numpy array takes as long as searching a short list. So the scores of
few instances are kept in a list, those of many in an array.
"""

import math

import numpy as np

from cleave.policy.dispatch import NONE, ScoreColumn, Scores, find_least

_INF = math.inf


class WritableScoreColumn(ScoreColumn):
    """A column that can be changed; +inf where the instance is closed for its use."""

    __slots__ = ()

    def set_score(self, slot: int, score: float) -> None:
        """Set one score."""
        raise NotImplementedError

    def to_list(self) -> list[float]:
        """All scores, for reading only."""
        raise NotImplementedError

    def to_array(self) -> Scores:
        """All scores, for reading only."""
        raise NotImplementedError


class ListScoreColumn(WritableScoreColumn):
    """A column in a list, for few instances: setting and reading one score is cheap."""

    __slots__ = ("_scores",)

    def __init__(self, size: int, score: float = _INF) -> None:
        """All slots start with this score."""
        super().__init__(size)
        self._scores = [score] * size

    def set_score(self, slot: int, score: float) -> None:
        """Set one score."""
        self._scores[slot] = score

    def get_score(self, slot: int) -> float:
        """One score."""
        return self._scores[slot]

    def find_least(self) -> int:
        """Slot with the lowest score; NONE when all are closed."""
        lowest, slot = _INF, NONE
        for index, score in enumerate(self._scores):
            if score < lowest:
                lowest, slot = score, index
        return slot

    def to_list(self) -> list[float]:
        """The scores themselves."""
        return self._scores

    def to_array(self) -> Scores:
        """A copy."""
        return np.array(self._scores)


class ArrayScoreColumn(WritableScoreColumn):
    """A column in an array, for many instances: searching all scores is cheap."""

    __slots__ = ("_cells", "_scores")

    def __init__(self, scores: Scores) -> None:
        """`scores`: used as they are, without a copy."""
        super().__init__(scores.size)
        self._scores = scores
        self._cells: memoryview[float] = scores.data.cast("B").cast("d")

    def set_score(self, slot: int, score: float) -> None:
        """Set one score."""
        self._cells[slot] = score

    def get_score(self, slot: int) -> float:
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
