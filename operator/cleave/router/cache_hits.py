"""What share of an instance's prompts was cached: as this gateway predicted, as the engine reports.

Updated by the registry with each load report, read by metrics and `/fleet`. What is hard: both
count tokens since the engine started, in different units (estimated tokens of this gateway's
prompts, and exact ones of all), and what was hours ago says nothing of now. So shares are compared,
over the last minutes.
"""

from collections import deque
from typing import NamedTuple

from cleave.policy.prefix_cache import compute_trust

WINDOW_S = 120.0
_STEP_S = 20.0
"""Time between two counts that are kept."""


class HitCounts(NamedTuple):
    """Tokens since the engine started."""

    at_s: float
    predicted_prompt: float = 0.0
    """Of prompts that this gateway has sent, estimated."""
    predicted_cached: float = 0.0
    """Those of them that it predicted to be cached."""
    engine_prompt: float = 0.0
    """Looked up in the engine's prefix cache, as it reports."""
    engine_cached: float = 0.0
    """Those of them that it had."""


class HitWindow:
    """The counts of the last `WINDOW_S` seconds of one boot of an engine."""

    __slots__ = ("_counts", "trust")

    def __init__(self) -> None:
        self._counts: deque[HitCounts] = deque()
        self.trust = 1.0
        """Factor on predictions for this engine, see `compute_trust`."""

    def update(self, counts: HitCounts) -> None:
        """Include a load report."""
        kept = self._counts
        if len(kept) > 1 and counts.at_s - kept[-2].at_s < _STEP_S:
            kept[-1] = counts
        else:
            kept.append(counts)
        while len(kept) > 2 and counts.at_s - kept[1].at_s >= WINDOW_S:
            kept.popleft()
        first = kept[0]
        self.trust = compute_trust(
            counts.predicted_prompt - first.predicted_prompt,
            counts.predicted_cached - first.predicted_cached,
            counts.engine_prompt - first.engine_prompt,
            counts.engine_cached - first.engine_cached,
        )

    @property
    def predicted_share(self) -> float | None:
        """Predicted share, 0..1; None: this gateway has sent no prompt there in the window."""
        return self._divide(2, 1)

    @property
    def engine_share(self) -> float | None:
        """The engine's, 0..1; None: it has looked nothing up, or does not report it."""
        return self._divide(4, 3)

    def _divide(self, part: int, whole: int) -> float | None:
        if len(self._counts) < 2:
            return None
        first, last = self._counts[0], self._counts[-1]
        total = last[whole] - first[whole]
        return (last[part] - first[part]) / total if total > 0 else None
