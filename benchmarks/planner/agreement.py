"""Two simulations of one trace, request by request. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Latencies = tuple[Sequence[float], Sequence[float]]
"""TTFT and TPOT of each request in milliseconds."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two simulations are apart."""

    ours: float
    """Share of requests that meet both targets."""
    theirs: float
    largest_ms: float
    """Largest difference of any request's TTFT or TPOT."""

    @property
    def points(self) -> float:
        """Difference of the attainments, in percentage points."""
        return 100 * abs(self.ours - self.theirs)


def agree(ours: Latencies, theirs: Latencies, targets_ms: tuple[float, float]) -> Agreement:
    gaps = [np.abs(np.asarray(a) - np.asarray(b)) for a, b in zip(ours, theirs, strict=True)]
    return Agreement(
        ours=attainment(ours, targets_ms),
        theirs=attainment(theirs, targets_ms),
        largest_ms=float(max(gap.max() for gap in gaps)),
    )


def attainment(latencies: Latencies, targets_ms: tuple[float, float]) -> float:
    """Share of requests that meet both targets; nan meets none."""
    ttft_ms, tpot_ms = (np.asarray(values) for values in latencies)
    return float(np.mean((ttft_ms <= targets_ms[0]) & (tpot_ms <= targets_ms[1])))
