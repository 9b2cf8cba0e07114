"""Counters of a gateway at two times, and the traffic between them. Pure.

Called by `cleave top` and the operator with pages of `GET /metrics`. What is hard: counters restart
at 0 with the gateway, so a window never includes a restart; and latencies are histograms, so
quantiles are only as exact as the buckets are narrow.
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_PREFIX = "cleave_gateway_"
START = "process_start_time_seconds"
_REFUSED_OUTCOME = "refused"
_TOTALS = (
    "prompt_tokens", "output_tokens", "flex_tokens", "shed", "retries", "recoveries", "flips",
)  # fmt: skip
"""Counters of the page with these names."""
_HISTOGRAMS = (
    "ttft_seconds", "tpot_seconds", "itl_seconds", "request_prompt_tokens", "request_output_tokens",
    "prompt_reuse_seconds",
)  # fmt: skip
_OTHERS = (
    "requests_total", "requests_in_flight", "requests_waiting", "slo_", "plan_threshold_tokens",
)  # fmt: skip
NAME_STARTS = (
    START,
    *(_PREFIX + name for name in (*_OTHERS, *_HISTOGRAMS)),
    *(f"{_PREFIX}{name}_total" for name in _TOTALS),
)
"""Beginnings of the names of metrics that are read."""


class CountsError(ValueError):
    """The page contains no metrics of a gateway."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram: number of values up to each bound (the last bound is infinite). Latencies are in
    seconds, lengths in tokens."""

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    total: float = 0.0
    """Sum of all values."""

    @classmethod
    def from_values(cls, values: Iterable[float], bounds: Sequence[float]) -> "Buckets":
        """A histogram of these values; the last bound must be infinite."""
        ordered = sorted(values)
        counts = (float(bisect_right(ordered, bound)) for bound in bounds)
        return cls(tuple(bounds), tuple(counts), sum(ordered))

    def __add__(self, other: "Buckets") -> "Buckets":
        """Sum of both. Gateways of different versions may have different bounds."""
        total = self.total + other.total
        if self.bounds == other.bounds:
            pairs = zip(self.counts, other.counts, strict=True)
            return Buckets(self.bounds, tuple(mine + theirs for mine, theirs in pairs), total)
        bounds = tuple(sorted({*self.bounds, *other.bounds}))
        sums = (self._count_up_to(bound) + other._count_up_to(bound) for bound in bounds)
        return Buckets(bounds, tuple(sums), total)

    def __sub__(self, before: "Buckets") -> "Buckets":
        """The values added since `before`."""
        earlier = dict(zip(before.bounds, before.counts, strict=True))
        pairs = zip(self.bounds, self.counts, strict=True)
        counts = tuple(count - earlier.get(bound, 0.0) for bound, count in pairs)
        return Buckets(self.bounds, counts, self.total - before.total)

    @property
    def num(self) -> float:
        """Number of values."""
        return self.counts[-1] if self.counts else 0.0

    @property
    def mean(self) -> float | None:
        """None: no values."""
        return self.total / self.num if self.num else None

    def compute_quantile(self, share: float) -> float | None:
        """As in Prometheus: linear inside a bucket, else the last finite bound; None: no values."""
        if not self.num:
            return None
        rank = share * self.counts[-1]
        at = min(bisect_left(self.counts, rank), len(self.counts) - 1)
        if math.isinf(self.bounds[at]):
            return self.bounds[at - 1] if at else None
        low, below = (self.bounds[at - 1], self.counts[at - 1]) if at else (0.0, 0.0)
        inside = self.counts[at] - below
        part = (rank - below) / inside if inside else 1.0
        return low + (self.bounds[at] - low) * part

    def compute_quantile_ms(self, share: float) -> float | None:
        """The same in milliseconds, for values in seconds."""
        quantile_s = self.compute_quantile(share)
        return None if quantile_s is None else quantile_s * 1000

    def compute_share(self, bound: float) -> float:
        """Share of values that are certainly at most `bound`; 1: no values."""
        return self._count_up_to(bound) / self.num if self.num else 1.0

    def _count_up_to(self, bound: float) -> float:
        """Number of values that are certainly at most `bound`."""
        at = bisect_right(self.bounds, bound)
        return self.counts[at - 1] if at else 0.0


@dataclass(frozen=True, slots=True)
class GatewayCounters:
    """Counters of one gateway since its start, summed over all models."""

    at_s: float = 0.0
    """When they were read, by the clock of the reader."""
    started_s: float = 0.0
    """Start of the gateway, Unix time."""
    requests: float = 0.0
    """Completed requests, except those rejected before they reached a model."""
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    flex_tokens: float = 0.0
    """Of prompts and outputs of requests that only fill idle capacity, counted nowhere else."""
    measured: float = 0.0
    """Responses that were measured against the targets."""
    attained: float = 0.0
    """Measured responses that met both targets."""
    ttft_attained: float = 0.0
    """Those that met the TTFT target, whatever their TPOT."""
    tpot_attained: float = 0.0
    ttft: Buckets = Buckets()
    tpot: Buckets = Buckets()
    itl: Buckets = Buckets()
    """Gaps between pieces of some streams."""
    prompts: Buckets = Buckets()
    """Lengths of requests that were answered."""
    outputs: Buckets = Buckets()
    reuse: Buckets = Buckets()
    """Prompt tokens by the time since an earlier prompt began alike, in seconds; new ones are in
    the infinite bucket. Empty: gateways do not look at prompts."""
    shed: float = 0.0
    retries: float = 0.0
    recoveries: float = 0.0
    flips: float = 0.0
    in_flight: float = 0.0
    """At the time of reading."""
    waiting: float = 0.0
    """Requests in flight that wait for admission at the gateway."""
    ttft_target_ms: float | None = None
    tpot_target_ms: float | None = None
    whole_below_tokens: int = 0
    """Prompt length up to which decode instances may compute prompts; 0: they compute none, or the
    gateway is of a version that does not report it."""


def select_lines(page: str) -> str:
    """The lines of a gateway's `/metrics` that `parse_metrics_page` reads, half of them or fewer;
    while a gateway has no requests they stay the same."""
    return "".join(line for line in page.splitlines(True) if line.startswith(NAME_STARTS))


def parse_metrics_page(page: str, at_s: float) -> GatewayCounters:
    """Parse a gateway's `/metrics`, read at `at_s`. Raises CountsError."""
    try:
        samples = _group_samples(select_lines(page))
    except ValueError as error:
        raise CountsError("not a page of metrics") from error
    if not any(name.startswith(_PREFIX) for name in samples):
        raise CountsError("a page without metrics of a gateway")
    return build_counters(samples, at_s)


def build_counters(samples: Mapping[str, list[Sample]], at_s: float) -> GatewayCounters:
    """Counters of one gateway from its samples by name, as they were at `at_s`."""

    def total(name: str, **labels: str) -> float:
        return sum(each.value for each in _select_samples(samples, name, labels))

    def target_ms(slo: str) -> float | None:
        # 0 means that no target is set.
        return total("slo_target_seconds", slo=slo) * 1000 or None

    return GatewayCounters(
        at_s=at_s,
        started_s=sum(sample.value for sample in samples.get(START, ())),
        requests=total("requests_total") - total("requests_total", outcome=_REFUSED_OUTCOME),
        measured=total("slo_total"),
        attained=total("slo_total", missed=""),
        ttft_attained=total("slo_total", missed="") + total("slo_total", missed="tpot"),
        tpot_attained=total("slo_total", missed="") + total("slo_total", missed="ttft"),
        ttft=_build_buckets(samples, "ttft_seconds"),
        tpot=_build_buckets(samples, "tpot_seconds"),
        itl=_build_buckets(samples, "itl_seconds"),
        prompts=_build_buckets(samples, "request_prompt_tokens"),
        outputs=_build_buckets(samples, "request_output_tokens"),
        reuse=_build_buckets(samples, "prompt_reuse_seconds"),
        **{name: total(f"{name}_total") for name in _TOTALS},
        in_flight=total("requests_in_flight"),
        waiting=total("requests_waiting"),
        ttft_target_ms=target_ms("ttft"),
        tpot_target_ms=target_ms("tpot"),
        whole_below_tokens=round(total("plan_threshold_tokens", threshold="short_prompt")),
    )


def _group_samples(page: str) -> Mapping[str, list[Sample]]:
    samples = defaultdict(list)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if not math.isfinite(sample.value):
                raise ValueError(f"{sample.name} is {sample.value}")
            samples[sample.name].append(sample)
    return samples


def _select_samples(
    samples: Mapping[str, list[Sample]], name: str, labels: Mapping[str, str]
) -> Iterator[Sample]:
    for sample in samples.get(_PREFIX + name, ()):
        if labels.items() <= sample.labels.items():
            yield sample


def _build_buckets(samples: Mapping[str, list[Sample]], name: str) -> Buckets:
    """Sum of the histograms of all labels."""
    counts: dict[float, float] = defaultdict(float)
    for sample in _select_samples(samples, name + "_bucket", {}):
        counts[float(sample.labels["le"])] += sample.value
    bounds = sorted(counts)
    total = sum(sample.value for sample in _select_samples(samples, name + "_sum", {}))
    return Buckets(tuple(bounds), tuple(counts[bound] for bound in bounds), total)


@dataclass(frozen=True, slots=True)
class TrafficRates:
    """Traffic of a window. None: no requests from which to compute the figure."""

    window_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    """Of completed requests."""
    measured_share: float | None
    """Share of requests that were measured against the targets: streamed responses, and requests
    that got none."""
    slo_attainment: float | None
    goodput: float | None
    """Requests per second that met both targets."""
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    tpot_p50_ms: float | None
    tpot_p90_ms: float | None
    shed: int
    retries: int
    recoveries: int
    flips: int


def compute_rates(before: GatewayCounters, after: GatewayCounters) -> TrafficRates | None:
    """Traffic between two readings of one gateway process; None: no time has passed."""
    window_s = after.at_s - before.at_s
    if window_s <= 0:
        return None
    requests = after.requests - before.requests
    measured, attained = after.measured - before.measured, after.attained - before.attained
    ttft, tpot = after.ttft - before.ttft, after.tpot - before.tpot
    counts = {
        name: round(getattr(after, name) - getattr(before, name))
        for name in ("shed", "retries", "recoveries", "flips")
    }
    return TrafficRates(
        window_s=window_s,
        requests_per_s=requests / window_s,
        prompt_tokens_per_s=(after.prompt_tokens - before.prompt_tokens) / window_s,
        output_tokens_per_s=(after.output_tokens - before.output_tokens) / window_s,
        measured_share=min(measured / requests, 1.0) if requests > 0 else None,
        slo_attainment=attained / measured if measured else None,
        goodput=attained / window_s if measured else None,
        ttft_p50_ms=ttft.compute_quantile_ms(0.5),
        ttft_p90_ms=ttft.compute_quantile_ms(0.9),
        tpot_p50_ms=tpot.compute_quantile_ms(0.5),
        tpot_p90_ms=tpot.compute_quantile_ms(0.9),
        **counts,
    )


class CounterHistory:
    """Counters of one gateway process, as far back as a window of `span_s` needs them."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._counters: deque[GatewayCounters] = deque()

    def add(self, counts: GatewayCounters) -> None:
        """Add counters that were just read; those of an earlier process are dropped."""
        if self._counters and self._counters[-1].started_s != counts.started_s:
            self._counters.clear()
        self._counters.append(counts)
        # Retain the last counters before the window: its start.
        while len(self._counters) > 2 and self._counters[1].at_s <= counts.at_s - self._span_s:
            self._counters.popleft()

    def get_rates(self, window_s: float) -> TrafficRates | None:
        """Traffic of the last `window_s`, or of the time covered so far; None: no counters yet."""
        if not self._counters:
            return None
        latest = self._counters[-1]
        start_s = latest.at_s - window_s
        before = next(
            (earlier for earlier, after in pairwise(self._counters) if after.at_s > start_s),
            self._counters[0],
        )
        return compute_rates(before, latest)
