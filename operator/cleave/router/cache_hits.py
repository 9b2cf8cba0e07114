"""What share of an instance's prompts was cached: as this gateway predicted, as the engine reports.

Updated by the registry with each load report, read by metrics and `/fleet`. What is hard: both
count tokens since the engine started, in different units (estimated tokens of this gateway's
prompts, and exact ones of all), and what was hours ago says nothing of now. So shares are compared,
over the last minutes, and both are those of the prompts that this gateway has looked up.
"""

from collections import deque
from typing import NamedTuple

from cleave.policy.prefix_cache import bound_hit_share, compute_trust

WINDOW_S = 120.0
_STEP_S = 20.0
"""Time between two counts that are kept."""
SAMPLE_S = 1.0
"""Time between two reports that are looked at: agents send ten a second."""
_SMOOTHED_S = 20.0
"""Time after which most of a new judgment counts."""


class HitCounts(NamedTuple):
    """Tokens since the engine started, of prompts that it has computed."""

    at_s: float
    sent: float = 0.0
    """By this gateway, estimated."""
    looked_up: float = 0.0
    """Of these, in prompts whose blocks were looked up: short ones are not."""
    predicted_cached: float = 0.0
    """Of these, predicted to be cached."""
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

    def is_due(self, now_s: float) -> bool:
        """Whether a report is to be included now."""
        return not self._counts or now_s - self._counts[-1].at_s >= SAMPLE_S

    def update(self, counts: HitCounts) -> None:
        """Include a load report. Counts of an engine that fall begin the window again."""
        kept = self._counts
        if kept and (
            counts.engine_prompt < kept[-1].engine_prompt
            or counts.engine_cached < kept[-1].engine_cached
        ):
            kept.clear()
        passed_s = counts.at_s - kept[-1].at_s if kept else 0.0
        if len(kept) > 1 and counts.at_s - kept[-2].at_s < _STEP_S:
            kept[-1] = counts
        else:
            kept.append(counts)
        while len(kept) > 2 and counts.at_s - kept[1].at_s >= WINDOW_S:
            kept.popleft()
        trust = compute_trust(*self._measure())
        if trust is not None:
            self.trust += (trust - self.trust) * min(passed_s / _SMOOTHED_S, 1.0)

    def _measure(self) -> tuple[float, float, float, float, float]:
        """What was counted in the window, as in HitCounts."""
        first, last = self._counts[0], self._counts[-1]
        return (
            last.sent - first.sent,
            last.looked_up - first.looked_up,
            last.predicted_cached - first.predicted_cached,
            last.engine_prompt - first.engine_prompt,
            last.engine_cached - first.engine_cached,
        )

    @property
    def predicted_share(self) -> float | None:
        """Predicted share of the prompts looked up, 0..1; None: there was none in the window."""
        if not self._counts:
            return None
        _, looked_up, predicted, _, _ = self._measure()
        return predicted / looked_up if looked_up > 0.0 else None

    @property
    def engine_share(self) -> float | None:
        """The engine's share of the same prompts at most, 0..1, or of all its prompts if this
        gateway looked none up; None: it reports no prompts."""
        if not self._counts:
            return None
        sent, looked_up, _, prompt, cached = self._measure()
        if prompt <= 0.0:
            return None
        return bound_hit_share(sent, looked_up, prompt, cached) if looked_up else cached / prompt
