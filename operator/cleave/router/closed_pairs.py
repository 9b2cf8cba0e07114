"""The pairs of one score table that must not be picked together. Used by the score table.

What is hard: a large fleet has a hundred thousand pairs and requests are picked far more often than
results change. So each result updates one column of a matrix, and picks only read it.
"""

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.bool_]
"""Whether something is so, by slot."""


class ClosedPairs:
    """Pairs by the slots of both instances."""

    __slots__ = ("_counts", "_decodes", "_matrix", "_num_decodes", "alone", "count", "expiry_s")

    def __init__(self, decodes: Mask) -> None:
        """`decodes`: the slots that are open for decoding."""
        size = decodes.size
        self._decodes = decodes
        self._num_decodes = int(decodes.sum())
        self._matrix = np.zeros((size, size), np.bool_)
        """Whether a pair is closed, by prefill slot and decode slot."""
        self._counts = np.zeros(size, np.int64)
        """Closed pairs with open decode slots, by prefill slot."""
        self.count = 0
        """Of all of them; 0: any prefill slot may be picked with any decode slot."""
        self.alone = np.zeros(size, np.bool_)
        """Prefill slots all of whose pairs with open decode slots are closed."""
        self.expiry_s = math.inf
        """A time until which none of them opens by itself, in seconds of the registry's clock."""

    def set_open(self, decode: int, *, is_open: bool) -> None:
        """Open or close a slot for decoding."""
        if bool(self._decodes[decode]) is is_open:
            return
        self._decodes[decode] = is_open
        sign = 1 if is_open else -1
        self._num_decodes += sign
        self._counts += sign * self._matrix[:, decode].astype(np.int64)
        self._find_alone()

    def _find_alone(self) -> None:
        self.alone = (self._counts > 0) & (self._counts >= self._num_decodes)

    def update(self, decode: int, until: Mapping[int, float]) -> None:
        """Replace the closed pairs of a decode slot. `until`: when each one opens by itself, by
        prefill slot."""
        column = np.zeros(self._decodes.size, np.bool_)
        if until:
            column[list(until)] = True
            self.expiry_s = min(self.expiry_s, min(until.values()))
        added = column.astype(np.int64) - self._matrix[:, decode]
        self._matrix[:, decode] = column
        self.count += int(added.sum())
        if self._decodes[decode]:
            self._counts += added
            self._find_alone()

    def is_closed(self, prefill: int, decode: int) -> bool:
        """Whether a pair is closed."""
        return bool(self._matrix[prefill, decode])

    def get_decodes(self, prefill: int) -> Mask:
        """The decode slots that must not be picked together with a prefill slot."""
        row: Mask = self._matrix[prefill]
        return row

    def find_alone(self, excluded: list[int]) -> Mask:
        """Prefill slots without an open pair where some slots are `excluded` as well."""
        if not excluded:
            return self.alone
        left = self._decodes.copy()
        left[excluded] = False
        alone: Mask = np.logical_and.reduce(self._matrix[:, left], axis=1)
        return alone
