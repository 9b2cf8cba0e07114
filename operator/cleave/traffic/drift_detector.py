"""Detects changes of the traffic: two-sided CUSUM on rate and mean lengths. Pure.

Page's cumulative sums (Biometrika 1954): the deviation of each window, in its own standard
deviations and less an allowance, is added up for each side; a sum above a limit is a change, which
began when that sum was last 0. What is hard: counts are skewed and lengths have heavy tails. Counts
are therefore compared by their square roots, mean lengths by their logarithms, with the larger of
the reference's and the observed variance; the contribution of one window is limited, so that no
single burst is a change.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from cleave.api.workload import LengthDistribution, Workload
from cleave.traffic.counters import Buckets
from cleave.traffic.refit import compute_dispersion, compute_variation
from cleave.traffic.window import TrafficWindow, join_windows
from cleave.traffic.workload import LogNormal

MIN_DIFFERENCE = 0.25
"""Changes by less than half of this are ignored: plans would not differ."""
SUM_LIMIT = 9.0
"""Limit of a sum, in standard deviations of a window."""
_ALLOWANCE = 0.5
_MAX_INCREMENT = 3.0
"""Largest contribution of one window: detecting a change takes at least three windows."""
_MIN_REQUESTS = 200
"""Minimum requests of a reference; its remaining error is accounted for."""
_MIN_WINDOWS = 6
_MAX_REFERENCE_WINDOWS = 40
"""Windows after which the reference stays fixed, so that slow changes are not absorbed by it."""
_MAX_LEARNING_S = 1800.0
"""After this time a reference is computed from the requests so far, if there are any."""
_MAX_WINDOWS = 240
"""Windows that are retained."""


class Quantity(StrEnum):
    """The monitored quantities."""

    RATE = "rate"
    PROMPT_TOKENS = "prompt tokens"
    OUTPUT_TOKENS = "output tokens"


@dataclass(frozen=True, slots=True)
class LengthSpread:
    """Mean and variation of one length."""

    mean: float
    variation: float
    """Standard deviation divided by the mean."""

    @classmethod
    def from_lengths(cls, lengths: LengthDistribution) -> "LengthSpread":
        """The spread of the log-normal distribution with these lengths."""
        sigma = LogNormal.from_mean_and_p90(lengths.mean, lengths.p90 or lengths.mean).sigma
        return cls(lengths.mean, math.sqrt(math.expm1(sigma**2)))

    @classmethod
    def from_buckets(cls, buckets: Buckets) -> "LengthSpread":
        """The spread of observed lengths; `buckets` must not be empty."""
        return cls(max(buckets.mean or 0.0, 1.0), compute_variation(buckets))


@dataclass(frozen=True, slots=True)
class TrafficReference:
    """The traffic before a change."""

    rate: float
    dispersion: float
    """Variance divided by mean of the requests in a window, 1 for Poisson."""
    prompt_tokens: LengthSpread
    output_tokens: LengthSpread
    num_requests: float = math.inf
    """Number of requests it was computed from; infinite: taken from the spec."""
    num_windows: float = math.inf

    @classmethod
    def from_workload(cls, workload: Workload) -> "TrafficReference | None":
        """The traffic of spec.workload; None: it comes from a trace, or without a rate."""
        if not (workload.rate and workload.prompt_tokens and workload.output_tokens):
            return None
        return cls(
            workload.rate,
            max(workload.gap_variation**2, 1.0),
            LengthSpread.from_lengths(workload.prompt_tokens),
            LengthSpread.from_lengths(workload.output_tokens),
        )


@dataclass(frozen=True, slots=True)
class TrafficChange:
    """A detected change of the traffic."""

    detected_s: float
    """When it was detected."""
    since_s: float
    """When it probably began."""
    quantity: Quantity
    before: float
    after: float
    """Mean since then, in req/s or tokens."""

    def __str__(self) -> str:
        unit = " req/s" if self.quantity is Quantity.RATE else ""
        return f"{self.quantity} {self.before:.3g} to {self.after:.3g}{unit}"


@dataclass(frozen=True, slots=True)
class _CusumState:
    quantity: Quantity
    sign: int
    value: float = 0.0
    since_s: float = 0.0
    """When it was last 0."""


_ZERO_SUMS = tuple(_CusumState(quantity, sign) for quantity in Quantity for sign in (1, -1))


@dataclass(frozen=True, slots=True)
class DriftDetector:
    """State of the detector; `update_detector` returns the next state."""

    reference: TrafficReference | None = None
    """None: it is computed from the first windows."""
    windows: tuple[TrafficWindow, ...] = ()
    """The latest windows."""
    sums: tuple[_CusumState, ...] = _ZERO_SUMS
    min_dispersion: float = 1.0
    """Dispersion before the last change, as a lower limit: few windows do not determine it."""

    @property
    def is_suspicious(self) -> bool:
        """Whether a change may soon be detected; the windows then hold two kinds of traffic."""
        return max(each.value for each in self.sums) >= SUM_LIMIT / 2


def update_detector(
    detector: DriftDetector, window: TrafficWindow
) -> tuple[DriftDetector, TrafficChange | None]:
    """The state after `window`, and the change if one is detected.

    After a change the reference is computed again from new windows; detection continues as soon as
    it exists. Windows from before the detection are left out of it: they are the least typical part
    of the sample and would cause the next false alarm.
    """
    if window.length_s <= 0:
        return detector, None
    reference, windows = detector.reference, (*detector.windows, window)[-_MAX_WINDOWS:]
    sums = detector.sums
    if reference is not None:
        sums = tuple(_update_sum(each, reference, window) for each in sums)
        highest = max(sums, key=lambda each: each.value)
        if highest.value >= SUM_LIMIT:
            recent = tuple(each for each in windows if each.end_s > highest.since_s)
            change = _build_change(highest, reference, recent)
            return DriftDetector(min_dispersion=reference.dispersion), change
    min_dispersion = detector.min_dispersion
    if reference is None or reference.num_windows < _MAX_REFERENCE_WINDOWS:
        reference = _build_reference(windows, min_dispersion) or reference
    return DriftDetector(reference, windows, sums, min_dispersion), None


def _build_reference(
    windows: tuple[TrafficWindow, ...], min_dispersion: float
) -> TrafficReference | None:
    joined = join_windows(windows)
    num_requests = min(joined.prompts.num, joined.outputs.num, joined.num_requests)
    if not num_requests:
        return None
    is_enough = num_requests >= _MIN_REQUESTS and len(windows) >= _MIN_WINDOWS
    if not is_enough and joined.length_s < _MAX_LEARNING_S:
        return None
    return TrafficReference(
        joined.rate,
        max(compute_dispersion(windows), min_dispersion),
        LengthSpread.from_buckets(joined.prompts),
        LengthSpread.from_buckets(joined.outputs),
        num_requests,
        len(windows),
    )


def _build_change(
    highest: _CusumState, reference: TrafficReference, recent: tuple[TrafficWindow, ...]
) -> TrafficChange:
    joined = join_windows(recent)
    before, after = {
        Quantity.RATE: (reference.rate, joined.rate),
        Quantity.PROMPT_TOKENS: (reference.prompt_tokens.mean, joined.prompts.mean or 0.0),
        Quantity.OUTPUT_TOKENS: (reference.output_tokens.mean, joined.outputs.mean or 0.0),
    }[highest.quantity]
    return TrafficChange(joined.end_s, highest.since_s, highest.quantity, before, after)


def _update_sum(
    previous: _CusumState, reference: TrafficReference, window: TrafficWindow
) -> _CusumState:
    deviations = _compute_deviation(previous.quantity, reference, window)
    if deviations is None:
        return previous
    deviation, scale, spread = deviations
    # Also allow for the standard error of the reference.
    reference_error = spread / math.sqrt(reference.num_requests)
    allowance = max(_ALLOWANCE, (math.log1p(MIN_DIFFERENCE) / 2) * scale) + reference_error * scale
    value = previous.value + min(previous.sign * deviation - allowance, _MAX_INCREMENT)
    if value <= 0:
        return replace(previous, value=0.0, since_s=window.end_s)
    since_s = previous.since_s if previous.value else window.start_s
    return replace(previous, value=value, since_s=since_s)


def _compute_deviation(
    quantity: Quantity, reference: TrafficReference, window: TrafficWindow
) -> tuple[float, float, float] | None:
    """(deviation, deviation of a factor of e, relative standard deviation of one request). The
    first two are in standard deviations of the window; None: no requests."""
    match quantity:
        case Quantity.RATE:
            expected = reference.rate * window.length_s
            spread = math.sqrt(reference.dispersion)
            # 3/8: Anscombe's transform, for which the root of a count has constant variance.
            roots = math.sqrt(window.num_requests + 0.375) - math.sqrt(expected + 0.375)
            return 2 * roots / spread, math.sqrt(expected) / spread, spread
        case Quantity.PROMPT_TOKENS:
            return _compare_lengths(reference.prompt_tokens, window.prompts)
        case Quantity.OUTPUT_TOKENS:
            return _compare_lengths(reference.output_tokens, window.outputs)


def _compare_lengths(
    reference: LengthSpread, buckets: Buckets
) -> tuple[float, float, float] | None:
    if not buckets.num or not buckets.total:
        return None
    current = LengthSpread.from_buckets(buckets)
    # The mean of n log-normal lengths is itself nearly log-normal, with this variance.
    variation = max(reference.variation, current.variation, 0.01)
    variance = math.log1p(variation**2 / buckets.num)
    return (
        (math.log(current.mean / reference.mean) + variance / 2) / math.sqrt(variance),
        1 / math.sqrt(variance),
        variation,
    )
