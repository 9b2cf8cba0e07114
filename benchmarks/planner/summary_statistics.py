"""A figure over the rounds of a benchmark. Pure."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """Of a figure over all rounds."""

    median: float
    min: float
    max: float

    def format(self, digits: int = 1) -> str:
        return f"{self.median:,.{digits}f} ({self.min:,.{digits}f}-{self.max:,.{digits}f})"


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))
