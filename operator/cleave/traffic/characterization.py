"""Describes recorded traffic, and how well distributions fit it.

Called by `cleave workload` and for the warnings of a plan. A planner that fits distributions to
traffic (DistServe, section 4.1) has to know when not to: waves of arrivals, drift and correlated
lengths are lost in a fit, while a replay preserves them.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cleave.api import workload as api
from cleave.simulator.trace import Trace
from cleave.traffic.workload import MAX_P90_TO_MEAN, Demand, DemandError, LogNormal, TraceReplay

THRESHOLDS = (512, 2048, 8192, 32768)
"""Prompts above the first threshold saturate a GPU (TetriInfer, section 2.2.1); above the second
Splitwise's prompt batches lose throughput (section III-D)."""

_RECOMMENDED_REQUESTS = 1000
_MIN_REQUESTS = 200
"""With fewer requests, random variation resembles waves, drift and unusual lengths."""
_MIN_WINDOWS = 20
"""Dispersion needs at least this many windows, with on average this many requests each."""
_MIN_REUSE = 0.05
"""Share of repeated tokens below which plans do not count on it."""
MAX_BURSTINESS = 20.0
_MAX_RATE = 1_000_000


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Statistics of prompt or output lengths, in tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    largest: int
    fit_distance: float
    """Largest difference between the recorded and the fitted cumulative share (Kolmogorov)."""

    def to_spec(self) -> api.LengthDistribution:
        """The log-normal distribution with this mean, and with this p90 as far as possible."""
        return fit_lengths(self.mean, self.p90)


@dataclass(frozen=True, slots=True)
class ArrivalSummary:
    """Statistics of arrivals."""

    duration_s: float
    rate: float
    """Mean arrivals in req/s."""
    burstiness: float
    """Coefficient of variation of the gaps: 0 regular, 1 Poisson."""
    dispersion: float | None
    """Variance divided by mean of the requests in a window: 1 for Poisson, near burstiness^2 for
    independent gaps, more when arrivals come in waves. None: too few windows."""
    window_s: float
    peak_to_mean: float
    """Highest rate of any tenth of the duration, divided by the mean rate."""
    drift: float
    """Rate of the second half divided by that of the first."""


@dataclass(frozen=True, slots=True)
class TraceDescription:
    """Description of recorded traffic for planning."""

    num_requests: int
    arrivals: ArrivalSummary | None
    """None: all requests arrive at once."""
    prompt_tokens: LengthSummary
    output_tokens: LengthSummary
    correlation: float
    """Rank correlation of prompt and output lengths (Spearman)."""
    prompts_above: tuple[tuple[int, float], ...]
    """Thresholds in tokens, each with the share of prompts above it."""
    warnings: tuple[str, ...]
    """One sentence each."""
    is_fit_good: bool
    """False: replay the trace, because distributions do not fit it."""


def characterize(trace: Trace) -> TraceDescription:
    """Describe recorded requests."""
    prompts = _summarize_lengths(trace.prompt_tokens)
    outputs = _summarize_lengths(trace.output_tokens)
    arrivals = _summarize_arrivals(trace) if trace.rate else None
    correlation = _compute_rank_correlation(trace.prompt_tokens, trace.output_tokens)
    misfits = [
        *([] if arrivals is None else _list_arrival_misfits(arrivals, len(trace))),
        *_list_length_misfits(prompts, outputs, correlation),
        *_list_reuse_misfits(trace),
    ]
    if len(trace) < _MIN_REQUESTS:
        misfits = []
    verdict = ["replay the trace rather than its fit: " + "; ".join(misfits)] if misfits else []
    return TraceDescription(
        len(trace),
        arrivals,
        prompts,
        outputs,
        correlation,
        tuple((limit, float(np.mean(trace.prompt_tokens > limit))) for limit in THRESHOLDS),
        (*trace.remarks, *_list_cautions(trace, arrivals), *verdict),
        not misfits,
    )


def list_remarks(demand: Demand, max_model_len: int) -> tuple[str, ...]:
    """Warnings about a demand for a plan with a model of that length, one sentence each."""
    messages = [*demand.remarks]
    cut = demand.compute_share_longer_than(max_model_len)
    if cut > 0:
        share = "less than 0.1%" if cut < 0.001 else f"{cut:.1%}"
        messages.append(
            f"{share} of the requests are longer than the model's {max_model_len:,} tokens and "
            "were cut"
        )
    if isinstance(demand.source, TraceReplay):
        trace = demand.source.trace
        messages += _list_cautions(trace, _summarize_arrivals(trace))
    return tuple(messages)


def fit_workload(
    trace: Trace, rate: float | None = None, burstiness: float | None = None
) -> api.Workload:
    """Fit log-normal lengths and gamma-distributed gaps, in the form of `spec.workload`.

    `rate`, `burstiness`: override those of the trace. Raises DemandError for a missing rate or one
    outside the allowed range.
    """
    arrivals = _summarize_arrivals(trace) if trace.rate else None
    if rate is None:
        if arrivals is None:
            raise DemandError(f"rate: {_explain_missing_rate(trace)}; set it")
        rate = arrivals.rate
    if not 0 < rate <= _MAX_RATE:
        raise DemandError(f"rate {rate:g}: must be above 0 and at most {_MAX_RATE:,} per second")
    if burstiness is None:
        burstiness = min(arrivals.burstiness, MAX_BURSTINESS) if arrivals else 1.0
    return api.Workload(
        rate=round_significant(rate),
        prompt_tokens=_summarize_lengths(trace.prompt_tokens).to_spec(),
        output_tokens=_summarize_lengths(trace.output_tokens).to_spec(),
        burstiness=round_significant(burstiness),
    )


def _summarize_lengths(tokens: NDArray[np.int64]) -> LengthSummary:
    mean, (p50, p90, p99) = float(np.mean(tokens)), np.percentile(tokens, [50, 90, 99]).tolist()
    spec = fit_lengths(mean, p90)
    fitted = LogNormal.from_mean_and_p90(spec.mean, spec.p90 or spec.mean)
    return LengthSummary(mean, p50, p90, p99, int(tokens.max()), _compute_distance(tokens, fitted))


def fit_lengths(mean: float, p90: float) -> api.LengthDistribution:
    """The log-normal distribution with this mean, and with this p90 as far as possible."""
    short = round_significant(mean)
    # Reduced by more than rounding to four digits may add.
    nearest = min(max(p90, short), short * MAX_P90_TO_MEAN * 0.999)
    return api.LengthDistribution(mean=short, p90=max(round_significant(nearest), short))


def _compute_distance(tokens: NDArray[np.int64], fitted: LogNormal) -> float:
    """Kolmogorov distance of whole numbers: the fitted share up to n is that below n + 1/2."""
    values, counts = np.unique(tokens, return_counts=True)
    up_to = np.cumsum(counts) / len(tokens)
    below = np.concatenate(([0.0], up_to[:-1]))
    at = np.array([fitted.share_below(value + 0.5) for value in values])
    before = np.array([fitted.share_below(value - 0.5) if value > 1 else 0.0 for value in values])
    return float(max(np.abs(up_to - at).max(), np.abs(below - before).max()))


def _summarize_arrivals(trace: Trace) -> ArrivalSummary:
    seconds = trace.arrival_ms / 1000
    gaps, duration_s = np.diff(seconds), float(seconds[-1] - seconds[0])
    window_s = max(1.0, _MIN_WINDOWS / trace.rate)
    windows = _count_per_window(seconds, int(duration_s / window_s), window_s)
    tenths = _count_per_window(seconds, 10, duration_s / 10)
    halves = _count_per_window(seconds, 2, duration_s / 2)
    return ArrivalSummary(
        duration_s,
        trace.rate,
        float(np.std(gaps) / np.mean(gaps)),
        float(np.var(windows) / np.mean(windows)) if len(windows) >= _MIN_WINDOWS else None,
        window_s,
        float(tenths.max() / tenths.mean()),
        float(halves[1] / halves[0]),
    )


def _count_per_window(seconds: NDArray[np.float64], num: int, width_s: float) -> NDArray[np.int64]:
    """Requests in each of `num` windows, starting with the first request."""
    edges = seconds[0] + width_s * np.arange(num + 1)
    if num:
        edges[-1] = np.nextafter(edges[-1], np.inf)
    return np.diff(np.searchsorted(seconds, edges))


def _compute_rank_correlation(first: NDArray[np.int64], second: NDArray[np.int64]) -> float:
    """Spearman's correlation. Equal lengths share their mean rank; 0: either side is constant."""
    ranks = []
    for tokens in (first, second):
        _, inverse, counts = np.unique(tokens, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2)[inverse])
    if min(float(np.std(each)) for each in ranks) == 0:
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _list_cautions(trace: Trace, arrivals: ArrivalSummary | None) -> list[str]:
    """Warnings that concern a fit and a replay alike."""
    cautions = []
    error = 1.96 * float(np.std(trace.prompt_tokens)) / math.sqrt(len(trace))
    if len(trace) < _RECOMMENDED_REQUESTS:
        cautions.append(
            f"only {len(trace)} requests: the mean prompt is known to +-"
            f"{error / float(np.mean(trace.prompt_tokens)):.0%}, rare long ones hardly at all; "
            f"record {_RECOMMENDED_REQUESTS:,} or more"
        )
    if arrivals is None:
        cautions.append(f"{_explain_missing_rate(trace)}: set a rate and a burstiness")
    elif arrivals.peak_to_mean > 1.5 and _is_peak(arrivals, len(trace)):
        cautions.append(
            f"the busiest tenth of the recording has {arrivals.peak_to_mean:.1f} times the mean "
            f"rate: to hold the SLO there, plan for {arrivals.rate * arrivals.peak_to_mean:.3g} "
            "req/s"
        )
    return cautions


def _explain_missing_rate(trace: Trace) -> str:
    if len(trace) == 1:
        return "one request has no rate"
    return "the requests have no arrival times (such as arrival_s), or all the same"


def _is_peak(arrivals: ArrivalSummary, num: int) -> bool:
    above_mean = (arrivals.peak_to_mean - 1) * num / 10
    return num >= _MIN_REQUESTS and _is_beyond_chance(above_mean, arrivals, num // 10)


def _is_beyond_chance(difference: float, arrivals: ArrivalSummary, num: int) -> bool:
    """Whether a count of about `num` differs by more than three of its standard deviations."""
    return difference > 3 * max(1.0, arrivals.burstiness) * math.sqrt(num)


def _list_arrival_misfits(arrivals: ArrivalSummary, num: int) -> list[str]:
    misfits = []
    independent = max(1.0, arrivals.burstiness**2)
    if arrivals.dispersion is not None and arrivals.dispersion > 2 * independent:
        misfits.append(
            f"arrivals come in waves (counts in windows of {arrivals.window_s:.0f} s vary "
            f"{arrivals.dispersion:.1f} times as much as Poisson's, where independent gaps give "
            f"{independent:.1f})"
        )
    between_halves = num * abs(arrivals.drift - 1) / (arrivals.drift + 1)
    if not 0.75 < arrivals.drift < 1.33 and _is_beyond_chance(between_halves, arrivals, num):
        misfits.append(f"the second half has {arrivals.drift:.2f} times the rate of the first")
    if arrivals.burstiness > MAX_BURSTINESS:
        misfits.append(
            f"gaps vary by {arrivals.burstiness:.0f} times their mean; the maximum burstiness is "
            f"{MAX_BURSTINESS:.0f}"
        )
    return misfits


def _list_length_misfits(
    prompts: LengthSummary, outputs: LengthSummary, correlation: float
) -> list[str]:
    misfits = [
        f"{name} lengths are not log-normal ({lengths.fit_distance:.0%} of requests lie elsewhere)"
        for name, lengths in (("prompt", prompts), ("output", outputs))
        if lengths.fit_distance > 0.1
    ]
    if abs(correlation) > 0.3:
        longer = "longer" if correlation > 0 else "shorter"
        misfits.append(
            f"longer prompts have {longer} outputs (correlation {correlation:.2f}), which a fit "
            "draws independently"
        )
    return misfits


def _list_reuse_misfits(trace: Trace) -> list[str]:
    share = float(trace.bound_cached_tokens().sum() / trace.prompt_tokens.sum())
    if share < _MIN_REUSE:
        return []
    return [f"prompts repeat (up to {share:.0%} of their tokens), which a fit does not"]


def round_significant(value: float) -> float:
    """Round to four significant digits, for values that users copy."""
    return float(f"{value:.4g}")
