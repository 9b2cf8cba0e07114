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

from cleave.api.workload import Lengths, Workload
from cleave.traffic.counters import Buckets
from cleave.traffic.refit import find_dispersion, find_variation
from cleave.traffic.window import Window, join
from cleave.traffic.workload import LogNormal

DIFFERENCE = 0.25
"""Changes by less than half of this are ignored: plans would not differ."""
LIMIT = 9.0
"""Limit of a sum, in standard deviations of a window."""
_ALLOWANCE = 0.5
_MOST = 3.0
"""Largest contribution of one window: detecting a change takes at least three windows."""
_ENOUGH = 200
"""Requests that a reference needs; its remaining error is allowed for."""
_ENOUGH_WINDOWS = 6
_MOST_LEARNT = 40
"""Windows after which the reference stays fixed, so that slow changes are not absorbed by it."""
_LONGEST_S = 1800.0
"""After this long a reference is computed from the requests so far, if there are any."""
_MOST_KEPT = 240
"""Windows that are retained."""


class Quantity(StrEnum):
    """The quantities that are watched for changes."""

    RATE = "rate"
    PROMPT_TOKENS = "prompt tokens"
    OUTPUT_TOKENS = "output tokens"


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and variation of one length."""

    mean: float
    variation: float
    """Standard deviation divided by the mean."""

    @classmethod
    def of(cls, lengths: Lengths) -> "Spread":
        """The spread of the log-normal distribution with these lengths."""
        sigma = LogNormal.through(lengths.mean, lengths.p90 or lengths.mean).sigma
        return cls(lengths.mean, math.sqrt(math.expm1(sigma**2)))

    @classmethod
    def seen(cls, buckets: Buckets) -> "Spread":
        """The spread of observed lengths; `buckets` must not be empty."""
        mean = buckets.mean or 0.0
        return cls(max(mean, 1.0), find_variation(buckets))


@dataclass(frozen=True, slots=True)
class Reference:
    """The traffic before a change."""

    rate: float
    dispersion: float
    """Variance divided by mean of the requests in a window, 1 for Poisson."""
    prompt_tokens: Spread
    output_tokens: Spread
    num_requests: float = math.inf
    """Number of requests it was computed from; infinite: taken from the spec."""
    num_windows: float = math.inf

    @classmethod
    def of(cls, workload: Workload) -> "Reference | None":
        """The traffic of spec.workload; None: it comes from a trace, or without a rate."""
        if not (workload.rate and workload.prompt_tokens and workload.output_tokens):
            return None
        return cls(
            workload.rate,
            max(workload.gap_variation**2, 1.0),
            Spread.of(workload.prompt_tokens),
            Spread.of(workload.output_tokens),
        )


@dataclass(frozen=True, slots=True)
class Change:
    """A detected change of the traffic."""

    at_s: float
    """When it was detected."""
    since_s: float
    """When it probably began."""
    what: Quantity
    before: float
    after: float
    """Mean since then, in req/s or tokens."""

    def __str__(self) -> str:
        unit = " req/s" if self.what is Quantity.RATE else ""
        return f"{self.what} {self.before:.3g} to {self.after:.3g}{unit}"


@dataclass(frozen=True, slots=True)
class _Sum:
    quantity: Quantity
    sign: int
    value: float = 0.0
    since_s: float = 0.0
    """When it was last 0."""


_NOTHING = tuple(_Sum(quantity, sign) for quantity in Quantity for sign in (1, -1))


@dataclass(frozen=True, slots=True)
class Detector:
    """State of the detector; `watch` returns the next state."""

    reference: Reference | None = None
    """None: it is computed from the first windows."""
    seen: tuple[Window, ...] = ()
    """The latest windows."""
    sums: tuple[_Sum, ...] = _NOTHING
    least_dispersion: float = 1.0
    """Dispersion before the last change, as a lower limit: few windows do not determine it."""

    @property
    def is_in_doubt(self) -> bool:
        """Whether a change may be about to be detected; the windows then contain two kinds of
        traffic."""
        return max(each.value for each in self.sums) >= LIMIT / 2


def watch(detector: Detector, window: Window) -> tuple[Detector, Change | None]:
    """The state after `window`, and the change if it completes one.

    After a change the reference is computed again from new windows; detection continues as soon as
    it exists. Windows from before the detection are left out of it: they are the least typical part
    of the sample and would cause the next false alarm.
    """
    if window.length_s <= 0:
        return detector, None
    reference, windows = detector.reference, (*detector.seen, window)[-_MOST_KEPT:]
    sums = detector.sums
    if reference is not None:
        sums = tuple(_add(each, reference, window) for each in sums)
        highest = max(sums, key=lambda each: each.value)
        if highest.value >= LIMIT:
            recent = tuple(each for each in windows if each.end_s > highest.since_s)
            return Detector(least_dispersion=reference.dispersion), _tell(
                highest, reference, recent
            )
    min_dispersion = detector.least_dispersion
    if reference is None or reference.num_windows < _MOST_LEARNT:
        reference = _learn(windows, min_dispersion) or reference
    return Detector(reference, windows, sums, min_dispersion), None


def _learn(windows: tuple[Window, ...], min_dispersion: float) -> Reference | None:
    joined = join(windows)
    num_requests = min(joined.prompts.num, joined.outputs.num, joined.num_requests)
    if not num_requests:
        return None
    is_enough = num_requests >= _ENOUGH and len(windows) >= _ENOUGH_WINDOWS
    if not is_enough and joined.length_s < _LONGEST_S:
        return None
    return Reference(
        joined.rate,
        max(find_dispersion(windows), min_dispersion),
        Spread.seen(joined.prompts),
        Spread.seen(joined.outputs),
        num_requests,
        len(windows),
    )


def _tell(highest: _Sum, reference: Reference, recent: tuple[Window, ...]) -> Change:
    joined = join(recent)
    before, after = {
        Quantity.RATE: (reference.rate, joined.rate),
        Quantity.PROMPT_TOKENS: (reference.prompt_tokens.mean, joined.prompts.mean or 0.0),
        Quantity.OUTPUT_TOKENS: (reference.output_tokens.mean, joined.outputs.mean or 0.0),
    }[highest.quantity]
    return Change(joined.end_s, highest.since_s, highest.quantity, before, after)


def _add(former: _Sum, reference: Reference, window: Window) -> _Sum:
    deviations = _deviate(former.quantity, reference, window)
    if deviations is None:
        return former
    deviation, scale, spread = deviations
    # Also allow for the standard error of the reference.
    reference_error = spread / math.sqrt(reference.num_requests)
    allowance = max(_ALLOWANCE, (math.log1p(DIFFERENCE) / 2) * scale) + reference_error * scale
    value = former.value + min(former.sign * deviation - allowance, _MOST)
    if value <= 0:
        return replace(former, value=0.0, since_s=window.end_s)
    since_s = former.since_s if former.value else window.start_s
    return replace(former, value=value, since_s=since_s)


def _deviate(
    quantity: Quantity, reference: Reference, window: Window
) -> tuple[float, float, float] | None:
    """(deviation, deviation of a factor of e, relative standard deviation of one request).

    The first two are in standard deviations of the window; None: no requests.
    """
    match quantity:
        case Quantity.RATE:
            expected = reference.rate * window.length_s
            spread = math.sqrt(reference.dispersion)
            # 3/8: Anscombe's transform, for which the root of a count has constant variance.
            roots = math.sqrt(window.num_requests + 0.375) - math.sqrt(expected + 0.375)
            return 2 * roots / spread, math.sqrt(expected) / spread, spread
        case Quantity.PROMPT_TOKENS:
            return _deviate_length(reference.prompt_tokens, window.prompts)
        case Quantity.OUTPUT_TOKENS:
            return _deviate_length(reference.output_tokens, window.outputs)


def _deviate_length(reference: Spread, buckets: Buckets) -> tuple[float, float, float] | None:
    if not buckets.num or not buckets.total:
        return None
    current = Spread.seen(buckets)
    # The mean of n log-normal lengths is itself nearly log-normal, with this variance.
    variation = max(reference.variation, current.variation, 0.01)
    variance = math.log1p(variation**2 / buckets.num)
    return (
        (math.log(current.mean / reference.mean) + variance / 2) / math.sqrt(variance),
        1 / math.sqrt(variance),
        variation,
    )
