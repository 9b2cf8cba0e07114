"""Whether the traffic is still what it was: two-sided CUSUM on rate and mean lengths. Pure.

Page's cumulative sums (Biometrika 1954): what a window deviates by, in its own standard
deviations and less an allowance, is added up on each side; a sum above a limit is a change, and
it began when that sum was last 0. What is hard: counts are skewed and lengths have heavy tails.
Counts are therefore compared by their square roots, mean lengths by their logarithms, with the
larger of the variances known and seen; one window counts only so much, so that no single burst
is a change.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from cleave.api.workload import Lengths, Workload
from cleave.traffic.counts import Buckets
from cleave.traffic.refit import find_dispersion, find_variation
from cleave.traffic.window import Window, join
from cleave.traffic.workload import LogNormal

DIFFERENCE = 0.25
"""Changes by less than half of this are none: plans do not differ for it."""
LIMIT = 9.0
"""Of a sum, in standard deviations of a window."""
_ALLOWANCE = 0.5
_MOST = 3.0
"""That one window adds: a change takes three windows to be seen."""
_ENOUGH = 200
"""Requests from which on a reference is known; what is not known well is allowed for."""
_ENOUGH_WINDOWS = 6
_MOST_LEARNT = 40
"""Windows: then it stays as it is, lest slow changes go unseen."""
_LONGEST_S = 1800.0
"""After so long it is learnt from what there was, if that is anything."""
_MOST_KEPT = 240
"""Windows."""


class Quantity(StrEnum):
    """What can change."""

    RATE = "rate"
    PROMPT_TOKENS = "prompt tokens"
    OUTPUT_TOKENS = "output tokens"


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one length."""

    mean: float
    variation: float
    """Standard deviation by mean."""

    @classmethod
    def of(cls, lengths: Lengths) -> "Spread":
        """As it is stated."""
        sigma = LogNormal.through(lengths.mean, lengths.p90 or lengths.mean).sigma
        return cls(lengths.mean, math.sqrt(math.expm1(sigma**2)))

    @classmethod
    def seen(cls, buckets: Buckets) -> "Spread":
        """As it came: something must have."""
        mean = buckets.mean or 0.0
        return cls(max(mean, 1.0), find_variation(buckets))


@dataclass(frozen=True, slots=True)
class Reference:
    """What the traffic was."""

    rate: float
    dispersion: float
    """Variance by mean of the requests in a window, 1 for Poisson."""
    prompt_tokens: Spread
    output_tokens: Spread
    num_requests: float = math.inf
    """That it was learnt from; infinite: it was stated."""
    num_windows: float = math.inf

    @classmethod
    def of(cls, workload: Workload) -> "Reference | None":
        """What was planned for; None: a trace states it, or no rate does."""
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
    """The traffic is not what it was."""

    at_s: float
    """When it was seen."""
    since_s: float
    """When it probably began."""
    what: Quantity
    before: float
    after: float
    """Mean since then; in req/s or tokens."""

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
    """What has been seen of the traffic so far; `watch` makes the next one."""

    reference: Reference | None = None
    """None: it is learnt from the first windows."""
    seen: tuple[Window, ...] = ()
    """The latest."""
    sums: tuple[_Sum, ...] = _NOTHING
    least_dispersion: float = 1.0
    """As it was before the last change: few windows tell little of it."""

    @property
    def is_in_doubt(self) -> bool:
        """Whether it may be about to find a change: what was seen then tells of two traffics."""
        return max(each.value for each in self.sums) >= LIMIT / 2


def watch(detector: Detector, window: Window) -> tuple[Detector, Change | None]:
    """The detector that has seen `window` too, and the change if there was one.

    After a change it learns what the traffic is now, and watches meanwhile, as well as it can. What
    came before the change was seen is left out: of chance, that is the least usual part, and would
    make the next false alarm.
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
    # A reference that is off by its own standard error is no change either.
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
    """(deviation, that of e times as much, relative standard deviation of one request).

    The first two are in standard deviations of the window; None: no request came.
    """
    match quantity:
        case Quantity.RATE:
            expected = reference.rate * window.length_s
            spread = math.sqrt(reference.dispersion)
            # 3/8: Anscombe's, with which the root of a count has the same variance everywhere.
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
    # The mean of n log-normal lengths is nearly log-normal itself, with this variance.
    variation = max(reference.variation, current.variation, 0.01)
    variance = math.log1p(variation**2 / buckets.num)
    return (
        (math.log(current.mean / reference.mean) + variance / 2) / math.sqrt(variance),
        1 / math.sqrt(variance),
        variation,
    )
