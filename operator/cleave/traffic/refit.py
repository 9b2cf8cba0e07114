"""The traffic of some windows in the form of `spec.workload`, for replanning. Pure.

DistServe, section 4.3: replanning uses recent history. What is hard: too few requests do not
determine their lengths (Aladdin, section 5.2), and gateways record histograms of lengths: means are
exact, quantiles are only as exact as the buckets are narrow.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np

from cleave.api.workload import LengthDistribution, Workload
from cleave.traffic.characterization import MAX_BURSTINESS, fit_lengths, round_significant
from cleave.traffic.counters import Buckets
from cleave.traffic.reuse_fit import fit_reuse
from cleave.traffic.window import TrafficWindow, join_windows
from cleave.traffic.workload import Demand, GeneratedRequests, IndependentLengths, Quantiles

MIN_REQUESTS = 200
"""Minimum number of requests: with fewer of usual lengths, the mean's error is 10 % or more."""
_MIN_WINDOWS = 4
_MAX_MARGIN = 0.25


class RefitError(LookupError):
    """Too few requests; one line."""


def refit(windows: Sequence[TrafficWindow]) -> Workload:
    """The workload of `windows`. Raises RefitError for too few requests."""
    joined = _join_windows(windows)
    return Workload(
        rate=round_significant(joined.rate),
        prompt_tokens=_to_lengths(joined.prompts),
        output_tokens=_to_lengths(joined.outputs),
        burstiness=round_significant(_compute_burstiness(windows)),
        reuse=fit_reuse(joined, _to_quantiles(joined.prompts)),
    )


def to_demand(windows: Sequence[TrafficWindow]) -> Demand:
    """The same for the planner, with lengths of the histograms, not fitted. Raises RefitError."""
    joined = _join_windows(windows)
    lengths = IndependentLengths(_to_quantiles(joined.prompts), _to_quantiles(joined.outputs))
    return Demand(joined.rate, GeneratedRequests(lengths, _compute_burstiness(windows)))


def compute_margin(windows: Sequence[TrafficWindow]) -> float:
    """Relative excess of tokens per second that may occur by chance. Two standard errors of rate
    and mean length. Raises RefitError."""
    joined = _join_windows(windows)
    lengths = max(compute_variation(each) for each in (joined.prompts, joined.outputs))
    variance = compute_dispersion(windows) + lengths**2
    return min(2 * math.sqrt(variance / joined.num_requests), _MAX_MARGIN)


def compute_dispersion(windows: Sequence[TrafficWindow]) -> float:
    """Variance divided by mean of the requests in a window, near burstiness^2; 1 for few windows.
    Values below 1 (Poisson) are raised to 1: with few windows they occur by chance."""
    nonempty = [each for each in windows if each.length_s > 0]
    requests = sum(each.num_requests for each in nonempty)
    if len(nonempty) < _MIN_WINDOWS or not requests:
        return 1.0
    rate = requests / sum(each.length_s for each in nonempty)
    pairs = [(each.num_requests, rate * each.length_s) for each in nonempty]
    squares = sum((num - expected) ** 2 / expected for num, expected in pairs)
    return max(squares / (len(nonempty) - 1), 1.0)


def compute_variation(buckets: Buckets) -> float:
    """Standard deviation divided by mean, each value taken at the middle of its bucket."""
    pairs = [(low * math.sqrt(high / low), share) for low, high, share in _list_pieces(buckets)]
    mean = sum(middle * share for middle, share in pairs)
    squares = sum(middle**2 * share for middle, share in pairs)
    return math.sqrt(max(squares / mean**2 - 1, 0.0))


def _join_windows(windows: Sequence[TrafficWindow]) -> TrafficWindow:
    joined = join_windows(windows) if windows else TrafficWindow(0.0, 0.0, 0.0)
    num_requests = min(joined.prompts.num, joined.outputs.num, joined.num_requests)
    if num_requests < MIN_REQUESTS:
        raise RefitError(
            f"{num_requests:.0f} requests were observed; {MIN_REQUESTS} are needed to determine "
            "their lengths"
        )
    return joined


def _compute_burstiness(windows: Sequence[TrafficWindow]) -> float:
    return min(math.sqrt(compute_dispersion(windows)), MAX_BURSTINESS)


def _to_lengths(buckets: Buckets) -> LengthDistribution:
    levels, tokens = _scale_to_mean(buckets)
    return fit_lengths(max(buckets.mean or 0.0, 1.0), float(np.interp(0.9, levels, tokens)))


def _to_quantiles(buckets: Buckets) -> Quantiles:
    levels, tokens = _scale_to_mean(buckets)
    return Quantiles(tuple(levels), tuple(tokens))


def _scale_to_mean(buckets: Buckets) -> tuple[list[float], list[float]]:
    """Levels and tokens, linear inside the buckets, scaled to the exact mean of the histogram."""
    levels, tokens, mean = [0.0], [1.0], 0.0
    for low, high, share in _list_pieces(buckets):
        if tokens[-1] != low:
            levels.append(levels[-1])
            tokens.append(low)
        levels.append(levels[-1] + share)
        tokens.append(high)
        mean += share * (low + high) / 2
    levels = [level / levels[-1] for level in levels]
    stretch = (buckets.mean or mean) / mean
    return levels, [each * stretch for each in tokens]


def _list_pieces(buckets: Buckets) -> Iterator[tuple[float, float, float]]:
    """(low, high, share) of each non-empty bucket; the infinite bucket has width 0."""
    below, low = 0.0, 1.0
    for bound, count in zip(buckets.bounds, buckets.counts, strict=True):
        high = low if math.isinf(bound) else max(bound, 1.0)
        if count > below:
            yield low, high, (count - below) / buckets.num
        below, low = count, high
