"""A latency model corrected by measurements in production.

Aladdin, section 5.1: the performance model is updated continuously from the workers' execution
traces. Here that is one factor for each phase, determined by `replan.model_check`. Factors correct
a machine that is slower or faster than its profile, but not a model with a wrong form.
"""

from dataclasses import dataclass, replace

from cleave.perf.estimate import Estimate, Estimator
from cleave.perf.pipeline import scale_timing

MIN_FACTOR, MAX_FACTOR = 0.1, 10.0
"""Range of a factor; outside of it the model describes a different machine or model."""


@dataclass(frozen=True, slots=True)
class Correction:
    """How many times longer iterations take than the model predicts, by phase."""

    prefill: float = 1.0
    decode: float = 1.0
    num_requests: int = 0
    """Number of requests that were measured."""

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            value = getattr(self, name)
            if not MIN_FACTOR <= value <= MAX_FACTOR:
                raise ValueError(f"{name} {value:g}: must be from {MIN_FACTOR:g} to {MAX_FACTOR:g}")

    def __str__(self) -> str:
        requests = f"from {self.num_requests:,} requests"
        return f"corrected by x{self.prefill:.2f} prefill, x{self.decode:.2f} decode {requests}"

    def scale(self, factor: float) -> "Correction":
        """This correction with both factors multiplied by `factor`, clamped to the range."""
        prefill, decode = clamp_factor(self.prefill * factor), clamp_factor(self.decode * factor)
        return replace(self, prefill=prefill, decode=decode)

    @property
    def is_identity(self) -> bool:
        """Whether it changes nothing."""
        return self.prefill == self.decode == 1.0


NO_CORRECTION = Correction()


def clamp_factor(factor: float) -> float:
    """The nearest factor within the range."""
    return min(max(factor, MIN_FACTOR), MAX_FACTOR)


class CorrectedEstimator:
    """Implements `cleave.perf.estimate.Estimator`: another estimator's iterations, corrected."""

    def __init__(self, estimator: Estimator, correction: Correction) -> None:
        self._estimator = estimator
        self._correction = correction

    def estimate(
        self, gpu: str, tensor: int, pipeline: int, data: int = 1, *, expert: bool = False
    ) -> Estimate | None:
        """The other estimator's result with scaled iterations; its source names the correction."""
        base = self._estimator.estimate(gpu, tensor, pipeline, data, expert=expert)
        if base is None:
            return None
        factor = self._correction
        timing = scale_timing(base.timing, prompt=factor.prefill, decode=factor.decode)
        trust = replace(base.confidence, source=f"{base.confidence.source}; {factor}")
        return replace(base, timing=timing, confidence=trust)

    def explain_unsupported(
        self, gpu: str, tensor: int, pipeline: int, data: int = 1, *, expert: bool = False
    ) -> str | None:
        """The other estimator's reason."""
        return self._estimator.explain_unsupported(gpu, tensor, pipeline, data, expert=expert)


def apply_correction(estimator: Estimator, correction: Correction) -> Estimator:
    """`estimator` with corrected iterations; `estimator` itself if nothing is to be corrected."""
    return estimator if correction.is_identity else CorrectedEstimator(estimator, correction)
