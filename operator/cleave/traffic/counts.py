"""What a gateway has counted at two moments, and what went on between them. Pure.

Called by `cleave top` with pages of `GET /metrics`. What is hard: counters begin anew when a
gateway is started again, so a window never reaches back over a start; and latencies are known by
buckets, so quantiles are as exact as those are fine.
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
_START = "process_start_time_seconds"
_NOT_ASKED_OF_MODELS = "refused"


class CountsError(ValueError):
    """The page is none of a gateway."""


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram: how many were at most each bound (the last one is infinite).

    Latencies are in seconds, lengths in tokens.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()
    total: float = 0.0
    """Of all values."""

    @classmethod
    def of(cls, values: Iterable[float], bounds: Sequence[float]) -> "Buckets":
        """These values, counted; the last bound is infinite."""
        ordered = sorted(values)
        counts = (float(bisect_right(ordered, bound)) for bound in bounds)
        return cls(tuple(bounds), tuple(counts), sum(ordered))

    def __add__(self, other: "Buckets") -> "Buckets":
        """Both together. Gateways of unlike versions may have unlike bounds."""
        total = self.total + other.total
        if self.bounds == other.bounds:
            pairs = zip(self.counts, other.counts, strict=True)
            return Buckets(self.bounds, tuple(mine + theirs for mine, theirs in pairs), total)
        bounds = tuple(sorted({*self.bounds, *other.bounds}))
        sums = (self._up_to(bound) + other._up_to(bound) for bound in bounds)
        return Buckets(bounds, tuple(sums), total)

    def __sub__(self, before: "Buckets") -> "Buckets":
        """What has come since `before`."""
        earlier = dict(zip(before.bounds, before.counts, strict=True))
        counts = (
            count - earlier.get(bound, 0.0)
            for bound, count in zip(self.bounds, self.counts, strict=True)
        )
        return Buckets(self.bounds, tuple(counts), self.total - before.total)

    @property
    def num(self) -> float:
        """How many were observed."""
        return self.counts[-1] if self.counts else 0.0

    @property
    def mean(self) -> float | None:
        """None: nothing was observed."""
        return self.total / self.num if self.num else None

    def find_quantile(self, share: float) -> float | None:
        """As Prometheus has it: even inside a bucket, the last finite bound for what is beyond.

        None: nothing was observed.
        """
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

    def find_quantile_ms(self, share: float) -> float | None:
        """The same of seconds."""
        quantile_s = self.find_quantile(share)
        return None if quantile_s is None else quantile_s * 1000

    def _up_to(self, bound: float) -> float:
        """How many are known to be at most so much."""
        at = bisect_right(self.bounds, bound)
        return self.counts[at - 1] if at else 0.0


@dataclass(frozen=True, slots=True)
class Counts:
    """All models of one gateway, since it was started."""

    at_s: float = 0.0
    """Of the clock of whoever asked."""
    started_s: float = 0.0
    """When the gateway was started, Unix time."""
    requests: float = 0.0
    """Those that ended, but for those that no model was to answer."""
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    judged: float = 0.0
    """Answers measured against the targets."""
    attained: float = 0.0
    """Of these, within both."""
    ttft: Buckets = Buckets()
    tpot: Buckets = Buckets()
    prompts: Buckets = Buckets()
    """Lengths of requests that were answered."""
    outputs: Buckets = Buckets()
    shed: float = 0.0
    retries: float = 0.0
    recoveries: float = 0.0
    flips: float = 0.0
    in_flight: float = 0.0
    """Now."""
    waiting: float = 0.0
    """Of these, for a turn at the gateway."""
    ttft_target_ms: float | None = None
    tpot_target_ms: float | None = None


def read_page(page: str, at_s: float) -> Counts:
    """What a gateway's `/metrics` says at `at_s`. Raises CountsError."""
    try:
        samples = _gather(page)
    except ValueError as error:
        raise CountsError("no page of metrics") from error
    if not any(name.startswith(_PREFIX) for name in samples):
        raise CountsError("a page without a metric of a gateway")

    def total(name: str, **labels: str) -> float:
        return sum(sample.value for sample in _find(samples, name, labels))

    def target_ms(slo: str) -> float | None:
        # 0 is none.
        return total("slo_target_seconds", slo=slo) * 1000 or None

    refused = total("requests_total", outcome=_NOT_ASKED_OF_MODELS)
    return Counts(
        at_s=at_s,
        started_s=sum(sample.value for sample in samples.get(_START, ())),
        requests=total("requests_total") - refused,
        prompt_tokens=total("prompt_tokens_total"),
        output_tokens=total("output_tokens_total"),
        judged=total("slo_total"),
        attained=total("slo_total", missed=""),
        ttft=_read_buckets(samples, "ttft_seconds"),
        tpot=_read_buckets(samples, "tpot_seconds"),
        prompts=_read_buckets(samples, "request_prompt_tokens"),
        outputs=_read_buckets(samples, "request_output_tokens"),
        shed=total("shed_total"),
        retries=total("retries_total"),
        recoveries=total("recoveries_total"),
        flips=total("flips_total"),
        in_flight=total("requests_in_flight"),
        waiting=total("requests_waiting"),
        ttft_target_ms=target_ms("ttft"),
        tpot_target_ms=target_ms("tpot"),
    )


def _gather(page: str) -> Mapping[str, list[Sample]]:
    samples = defaultdict(list)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            samples[sample.name].append(sample)
    return samples


def _find(
    samples: Mapping[str, list[Sample]], name: str, labels: Mapping[str, str]
) -> Iterator[Sample]:
    for sample in samples.get(_PREFIX + name, ()):
        if labels.items() <= sample.labels.items():
            yield sample


def _read_buckets(samples: Mapping[str, list[Sample]], name: str) -> Buckets:
    """Of all labels together."""
    counts: dict[float, float] = defaultdict(float)
    for sample in _find(samples, name + "_bucket", {}):
        counts[float(sample.labels["le"])] += sample.value
    bounds = sorted(counts)
    total = sum(sample.value for sample in _find(samples, name + "_sum", {}))
    return Buckets(tuple(bounds), tuple(counts[bound] for bound in bounds), total)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What went on in a window. None: nothing happened that would tell."""

    window_s: float
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    """Of requests that ended."""
    slo_attainment: float | None
    goodput: float | None
    """Requests per second that met both targets; only streams are measured against them."""
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    tpot_p50_ms: float | None
    tpot_p90_ms: float | None
    shed: int
    retries: int
    recoveries: int
    flips: int


def compare(before: Counts, after: Counts) -> Traffic | None:
    """What went on between two moments of one run of a gateway; None: no time has passed."""
    window_s = after.at_s - before.at_s
    if window_s <= 0:
        return None
    measured, attained = after.judged - before.judged, after.attained - before.attained
    ttft, tpot = after.ttft - before.ttft, after.tpot - before.tpot
    return Traffic(
        window_s=window_s,
        requests_per_s=(after.requests - before.requests) / window_s,
        prompt_tokens_per_s=(after.prompt_tokens - before.prompt_tokens) / window_s,
        output_tokens_per_s=(after.output_tokens - before.output_tokens) / window_s,
        slo_attainment=attained / measured if measured else None,
        goodput=attained / window_s if measured else None,
        ttft_p50_ms=ttft.find_quantile_ms(0.5),
        ttft_p90_ms=ttft.find_quantile_ms(0.9),
        tpot_p50_ms=tpot.find_quantile_ms(0.5),
        tpot_p90_ms=tpot.find_quantile_ms(0.9),
        shed=round(after.shed - before.shed),
        retries=round(after.retries - before.retries),
        recoveries=round(after.recoveries - before.recoveries),
        flips=round(after.flips - before.flips),
    )


class History:
    """The counts of one run of a gateway, so far as a window of `span_s` needs them."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._kept: deque[Counts] = deque()

    def add(self, counts: Counts) -> None:
        """Counts that were just read."""
        if self._kept and self._kept[-1].started_s != counts.started_s:
            self._kept.clear()
        self._kept.append(counts)
        # The last one before the window is where it begins.
        while len(self._kept) > 2 and self._kept[1].at_s <= counts.at_s - self._span_s:
            self._kept.popleft()

    def look_back(self, window_s: float) -> Traffic | None:
        """The last `window_s`, or as much of it as is known; None: nothing yet."""
        if not self._kept:
            return None
        latest = self._kept[-1]
        begins = latest.at_s - window_s
        before = next(
            (earlier for earlier, after in pairwise(self._kept) if after.at_s > begins),
            self._kept[0],
        )
        return compare(before, latest)
