"""A latency model corrected by what was measured while it served.

Aladdin, section 5.1: the performance model is updated continuously from the workers' execution
traces. Here that is a factor for each phase, found by the planner's guard; a shape that is wrong
stays wrong, a machine that is slower than its profile says does not.
"""

from dataclasses import dataclass, replace

from cleave.perf import pipeline
from cleave.perf.estimate import Estimate, Estimator

LEAST, MOST = 0.1, 10.0
"""Beyond, the model is of something else, and no factor mends it."""


@dataclass(frozen=True, slots=True)
class Correction:
    """How much longer passes take than the model says."""

    prefill: float = 1.0
    decode: float = 1.0
    num_requests: int = 0
    """That it rests on."""

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            value = getattr(self, name)
            if not LEAST <= value <= MOST:
                raise ValueError(f"{name} {value:g}: must be from {LEAST:g} to {MOST:g}")

    def __str__(self) -> str:
        requests = f"from {self.num_requests:,} requests"
        return f"corrected by x{self.prefill:.2f} prefill, x{self.decode:.2f} decode {requests}"

    def times(self, factor: float) -> "Correction":
        """With passes of both phases so much longer, as far as a correction goes."""
        return replace(
            self, prefill=bound(self.prefill * factor), decode=bound(self.decode * factor)
        )

    @property
    def is_none(self) -> bool:
        """Whether the model stays as it is."""
        return self.prefill == self.decode == 1.0


NONE = Correction()


def bound(factor: float) -> float:
    """The nearest one that a correction may have."""
    return min(max(factor, LEAST), MOST)


class CorrectedEstimator:
    """Implements `cleave.perf.estimate.Estimator`: another one's passes, corrected."""

    def __init__(self, estimator: Estimator, correction: Correction) -> None:
        self._estimator = estimator
        self._correction = correction

    def estimate(
        self, gpu: str, tensor_parallel_size: int, pipeline_parallel_size: int
    ) -> Estimate | None:
        """With longer or shorter passes, which is said with how far they are trusted."""
        found = self._estimator.estimate(gpu, tensor_parallel_size, pipeline_parallel_size)
        if found is None:
            return None
        factor = self._correction
        timing = pipeline.scaled(found.timing, prompt=factor.prefill, decode=factor.decode)
        trust = replace(found.trust, source=f"{found.trust.source}; {factor}")
        return replace(found, timing=timing, trust=trust)

    def why_not(
        self, gpu: str, tensor_parallel_size: int, pipeline_parallel_size: int
    ) -> str | None:
        """As the other one says."""
        return self._estimator.why_not(gpu, tensor_parallel_size, pipeline_parallel_size)


def correct(estimator: Estimator, correction: Correction) -> Estimator:
    """`estimator` with its passes corrected; itself where there is nothing to correct."""
    return estimator if correction.is_none else CorrectedEstimator(estimator, correction)
