"""Simulations of one workload: the share of requests that a fleet serves within the targets.

Every step of the search is a trial here, so that all fleets serve the same requests. What is hard:
a simulation begins and ends with empty instances, which makes it look too good. A trial therefore
counts only requests that arrive after the fleet has filled and before arrivals stop (the lifetime
of a request under the targets is simulated at both ends and not counted). It also lasts long enough
to show a small overload: a queue that grows by 1 % of the time exceeds the TTFT target after a
hundred targets. Gaps are scaled so that the rate of the sample is exactly the requested rate. Where
prompts repeat, caches begin empty as well: further requests come first, as many as lie between most
repetitions. All blocks of a trial's prompts are in memory, so where prompts have many, a trial has
fewer requests.
"""

import functools
import math
import sys
import zlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np
import numpy.typing as npt

from cleave.api.deployment import Slo
from cleave.planner.search.capacity_bound import LengthStatistics
from cleave.simulator.fleet import SimulatedFleet
from cleave.simulator.outcome import InterTokenLatencies, SimulationResult, Times
from cleave.simulator.run import (
    NEVER,
    EarlyVerdict,
    PreparedFleet,
    Window,
    measure_latencies,
    simulate,
)
from cleave.simulator.trace import Trace
from cleave.traffic.workload import Demand, RequestSource

Fleet = SimulatedFleet | PreparedFleet

LATENCIES = ("tpot_ms", "itl_p99_ms", "ttft_ms")
"""The fields of Targets that are latencies."""
ITL_LEVEL = 0.99
"""Share of tokens that must follow within `Targets.itl_p99_ms`."""
MIN_TTFT_TARGETS = 100.0
"""Shortest duration of a trial, in TTFT targets."""
_MAX_SAMPLE_FACTOR = 4
"""A trial need not cover `Precision.lifetimes` when it has this many times the minimum number of
requests: with many concurrent requests the variance is small anyway."""
_FIRST_REQUESTS = 4000
"""Of long trials this many counted requests are tried first: most fleets are far too small ..."""
_FIRST_SLACK = 2.0
"""... which is certain where this share of what may be late is late as well."""
_MAX_RAMP_FACTOR = 4
"""Most requests before the counted ones, as a multiple of them. Wide instances of data-parallel
ranks serve thousands at once, and seem better while they fill."""
_MAX_REQUESTS = 200_000
"""Most counted requests of a trial."""
_WARMUP_SHARE = 0.9
"""Share of repetitions whose first use lies within the warm-up ..."""
_MAX_WARMUP = 20_000
"""... and most requests of it. What is older is not found, which only makes plans larger."""
_WARMUP_SAMPLE = 20_000
"""Requests among which repetitions are looked for."""
_MAX_BLOCKS = 2_000_000
"""Most blocks in the prompts of a trial; a simulation takes up to 120 bytes for each. With
MAX_BLOCKS_PER_PROMPT in each it has 31,250 requests, of which at least a quarter are counted."""
MAX_RATE_FACTOR = 2
"""Rates up to so many times the requested one are tried ..."""
MIN_MAX_RATE = 500.0
"""... and up to this one (req/s). A tiny model would serve tens of thousands of requests a second,
in trials of a million requests each."""
_FINGERPRINT_REQUESTS = 64
_MAX_DURATION_S = 600.0
"""Upper bound of the duration from MIN_TTFT_TARGETS."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How long trials are."""

    min_requests: int
    """Fewest counted requests."""
    lifetimes: float
    """Shortest duration, in lifetimes of a request under the targets."""


RANKING_PRECISION = Precision(min_requests=1000, lifetimes=4.0)
"""Enough to compare: all candidates serve the same requests and have similar errors. Instances that
are short of memory seem up to a fifth too good, because queues for memory grow slowly."""
CONFIRMATION_PRECISION = Precision(min_requests=10_000, lifetimes=10.0)
"""Enough to report: the remaining error is a few per cent, within the confidence interval."""


@dataclass(slots=True)
class SimulationTally:
    """Number of simulations and simulated requests."""

    trials: int = 0
    requests: int = 0
    """Including requests that are not counted in a share."""


@dataclass(frozen=True, slots=True)
class Targets:
    """The targets of a request; an infinite one does not apply."""

    ttft_ms: float
    tpot_ms: float
    attainment: float
    itl_p99_ms: float = math.inf
    """Of all tokens together, not of a request."""
    ttft_attainment: float = 0.0
    """Share of requests that must meet the TTFT target, whatever their TPOT; 0: no own one."""
    tpot_attainment: float = 0.0

    @classmethod
    def from_slo(cls, slo: Slo) -> Self:
        """The targets of a deployment's SLO."""
        return cls(
            slo.ttft_ms,
            slo.tpot_ms,
            slo.attainment,
            slo.itl_p99_ms or math.inf,
            slo.ttft_attainment or 0.0,
            slo.tpot_attainment or 0.0,
        )

    def scale(self, scale: float) -> "Targets":
        """The same with all latencies multiplied by `scale`."""
        latencies = {name: getattr(self, name) * scale for name in LATENCIES}
        return replace(self, **latencies)

    def scale_own(self, ttft: float, tpot: float, tokens: float) -> tuple[float, float, float]:
        """The shares of requests within TTFT, within TPOT, and of tokens within `itl_p99_ms`, on
        the scale of `attainment`: as far above or below it as from their own targets, in parts of
        what may be late; 1 where there is no own target."""
        levels = self.ttft_attainment, self.tpot_attainment, ITL_LEVEL
        own = zip((ttft, tpot, tokens), levels, strict=True)
        first, second, third = (self._scale_share(share, level) for share, level in own)
        return first, second, third

    def _scale_share(self, share: float, target: float) -> float:
        if not target or share == 1:
            return 1.0
        late = (1 - share) / (1 - target) if target < 1 else math.inf
        if self.attainment == 1:
            return float(late <= 1)
        return max(1 - late * (1 - self.attainment), 0.0)

    @property
    def longest_gap_ms(self) -> float:
        """Longest iteration of an instance that only decodes and meets the targets, in ms."""
        return min(self.tpot_ms, self.itl_p99_ms)

    @property
    def prefill_only(self) -> "Targets":
        """For DistServe's simu_prefill: TTFT alone."""
        return replace(self, tpot_ms=math.inf, itl_p99_ms=math.inf)

    @property
    def decode_only(self) -> "Targets":
        """For DistServe's simu_decode: without TTFT."""
        return replace(self, ttft_ms=math.inf)


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of the counted requests of one trial that met the targets; less where one of the
    `Targets.scale_own` of that latency is."""

    both: float
    """Both targets."""
    ttft: float
    tpot: float
    slow: float
    """Requests that ended and missed TPOT; those of a trial that was cut short are not all."""
    running_peaks: tuple[int, int, int]
    """Most requests that ran on a prefill, a decode and a mixed instance at once."""


@dataclass(frozen=True, eq=False)
class ServiceSample:
    """What a fleet does with one sample of requests."""

    ttft_ms: Times
    tpot_ms: Times
    itl: InterTokenLatencies
    targets: Targets

    @cached_property
    def share(self) -> float:
        """Of the requests that meet both targets."""
        return float(np.mean(self._ttft & self._tpot))

    @cached_property
    def least_share(self) -> float:
        """`share`, or less where a target of its own is met worse, see `Targets.scale_own`."""
        targets = self.targets
        itl = self.itl.compute_share(targets.itl_p99_ms)
        own = targets.scale_own(float(self._ttft.mean()), float(self._tpot.mean()), itl)
        return min(self.share, *own)

    @property
    def _ttft(self) -> npt.NDArray[np.bool_]:
        return self.ttft_ms <= self.targets.ttft_ms

    @property
    def _tpot(self) -> npt.NDArray[np.bool_]:
        return self.tpot_ms <= self.targets.tpot_ms


@dataclass(frozen=True, slots=True)
class TrialSpan:
    """Number of requests of a trial, in order of arrival."""

    ramp: int
    """Requests that are not counted, at the beginning and again at the end."""
    counted: int
    warmup: int = 0
    """Requests before all others, which fill prefix caches."""

    @property
    def total(self) -> int:
        """All simulated requests."""
        return self.warmup + self.counted + 2 * self.ramp

    @property
    def window(self) -> slice:
        """Slice of the counted requests among all."""
        first = self.warmup + self.ramp
        return slice(first, first + self.counted)


@dataclass(slots=True)
class Trials:
    """Simulates fleets under one demand, and counts the simulated requests."""

    demand: Demand
    seed: int = 0
    precision: Precision = RANKING_PRECISION
    tally: SimulationTally = field(default_factory=SimulationTally)
    samples: dict[tuple[object, ...], list[ServiceSample]] = field(default_factory=dict)
    """What `sample_service` found, by fleet, rate, span, targets and seed."""
    _unit_traces: dict[tuple[int, int], Trace] = field(default_factory=dict)
    _lengths: dict[int, LengthStatistics] = field(default_factory=dict)

    @property
    def fingerprint(self) -> int:
        """Differs between workloads by the lengths of their requests, so that what flatters one is
        not what flatters all; 32 bits, the same for every rate and SLO."""
        return _compute_fingerprint(self.demand.source)

    @property
    def warmup(self) -> int:
        """Requests that fill prefix caches before a trial; 0 where no prompts repeat."""
        return min(_compute_warmup(self.demand), _compute_max_requests(self.demand) // 2)

    @property
    def max_rate(self) -> float:
        """Highest rate at which fleets are tried, in req/s: more has no value for the demand."""
        return max(MAX_RATE_FACTOR * self.demand.rate, MIN_MAX_RATE)

    def with_seed(self, seed: int) -> "Trials":
        """The same demand with other random requests."""
        return replace(self, seed=seed, _lengths={})

    def with_precision(self, precision: Precision) -> "Trials":
        """The same with longer or shorter trials."""
        return replace(self, precision=precision)

    def compute_span(self, rate: float, targets: Targets) -> TrialSpan:
        """Number of requests of a trial at `rate`."""
        life_s = self._compute_lifetime_ms(targets) / 1000
        ttft_s = targets.ttft_ms / 1000 if math.isfinite(targets.ttft_ms) else 0.0
        overload_s = ttft_s * MIN_TTFT_TARGETS
        min_requests = self.precision.min_requests
        lives = min(rate * life_s * self.precision.lifetimes, _MAX_SAMPLE_FACTOR * min_requests)
        overload = rate * min(overload_s, _MAX_DURATION_S)
        counted = int(min(max(lives, overload, min_requests), _MAX_REQUESTS))
        return self.build_span(
            int(min(math.ceil(rate * life_s), _MAX_RAMP_FACTOR * counted)), counted
        )

    def build_span(self, ramp: int, counted: int) -> TrialSpan:
        """A trial of so many requests; of fewer, where their prompts have too many blocks."""
        most = _compute_max_requests(self.demand) - self.warmup
        ramp = min(ramp, most // 4)
        return TrialSpan(ramp=ramp, counted=min(counted, most - 2 * ramp), warmup=self.warmup)

    def measure_shares(
        self,
        fleet: Fleet,
        rate: float,
        targets: Targets,
        span: TrialSpan,
        least: float = 0.0,
    ) -> Shares:
        """Simulate `fleet` at `rate` and measure the shares of requests that met the targets.

        Below `least` the share of both may be any, because the trial ends as soon as that is
        certain: an overloaded fleet takes the longest to simulate.
        """
        if span.counted > 4 * _FIRST_REQUESTS:
            first = replace(span, counted=_FIRST_REQUESTS)
            enough = least - _FIRST_SLACK * (1 - least)
            if enough > 0:
                shares = self.measure_shares(fleet, rate, targets, first, enough)
                if shares.both < enough:
                    return shares
        max_missed = math.ceil((1 - least) * span.counted)
        counted = range(span.window.start, span.window.stop)
        verdict = EarlyVerdict(counted, targets.ttft_ms, targets.tpot_ms, max_missed)
        trace = self.build_trace(span.total, rate)
        window = NEVER if math.isinf(targets.itl_p99_ms) else _find_window(trace, span)
        ttft_ms, tpot_ms, arrived, peaks, itl = measure_latencies(
            fleet, trace, self.seed, verdict, window
        )
        self._record(arrived)
        # nan (an unfinished request) compares as missing its target.
        is_ttft_met = ttft_ms[span.window] <= targets.ttft_ms
        is_tpot_met = tpot_ms[span.window] <= targets.tpot_ms
        is_slow = tpot_ms[span.window] > targets.tpot_ms
        outcomes = (is_ttft_met & is_tpot_met, is_ttft_met, is_tpot_met, is_slow)
        both, ttft, tpot, slow = (float(np.count_nonzero(x)) / len(x) for x in outcomes)
        own = targets.scale_own(ttft, tpot, itl.compute_share(targets.itl_p99_ms))
        return Shares(min(both, *own), min(ttft, own[0]), min(tpot, *own[1:]), slow, peaks)

    def holds(self, fleet: Fleet, rate: float, targets: Targets, span: TrialSpan) -> bool:
        """Simulate `fleet` at `rate`: whether the attainment target is met."""
        shares = self.measure_shares(fleet, rate, targets, span, least=targets.attainment)
        return shares.both >= targets.attainment

    def simulate(self, fleet: Fleet, rate: float, span: TrialSpan) -> SimulationResult:
        """Simulate `fleet` at `rate` and return the outcome of all requests."""
        self._record(span.total)
        trace = self.build_trace(span.total, rate)
        return simulate(fleet, trace, self.seed, _find_window(trace, span))

    def build_trace(self, num: int, rate: float) -> Trace:
        """`num` requests at exactly `rate`; another rate scales the gaps of the same requests."""
        unit = self._get_unit_trace(num)
        return replace(unit, arrival_ms=unit.arrival_ms / rate)

    def get_lengths(self, num: int | None = None) -> LengthStatistics:
        """Length statistics of the requests of a trial of `num` requests, for rate bounds; without
        those that fill caches."""
        num = num or self.warmup + self.precision.min_requests
        if num not in self._lengths:
            trace = self._get_unit_trace(num)
            self._lengths[num] = LengthStatistics.from_trace(trace, self.warmup)
        return self._lengths[num]

    def get_sample(self) -> Trace:
        """The requests of a short trial, at one per second; the first `warmup` fill caches."""
        return self._get_unit_trace(self.warmup + self.precision.min_requests)

    def _record(self, num_requests: int) -> None:
        self.tally.trials += 1
        self.tally.requests += num_requests

    def _get_unit_trace(self, num: int) -> Trace:
        unit = self._unit_traces.get((self.seed, num))
        if unit is None:
            drawn = self.demand.draw(num, 1.0, self.seed)
            span_ms = float(drawn.arrival_ms[-1])
            stretch = num * 1000.0 / span_ms if span_ms else 1.0
            unit = replace(drawn, arrival_ms=drawn.arrival_ms * stretch)
            self._unit_traces[self.seed, num] = unit
        return unit

    def _compute_lifetime_ms(self, targets: Targets) -> float:
        lengths = self.get_lengths()
        ttft_ms = targets.ttft_ms if math.isfinite(targets.ttft_ms) else 0.0
        tpot_ms = targets.tpot_ms if math.isfinite(targets.tpot_ms) else 0.0
        return ttft_ms + tpot_ms * lengths.decode_steps


def _find_window(trace: Trace, span: TrialSpan) -> Window:
    """The time in which the counted requests arrive, for times between tokens."""
    counted = trace.arrival_ms[span.window]
    return float(counted[0]), float(counted[-1])


@functools.lru_cache(maxsize=16)
def _compute_fingerprint(source: RequestSource) -> int:
    _, prompts, outputs = source.draw(_FINGERPRINT_REQUESTS, 0)
    return zlib.crc32(np.rint([prompts, outputs]).astype(np.int64).tobytes())


@functools.lru_cache(maxsize=16)
def _compute_max_requests(demand: Demand) -> int:
    """Most requests of a trial, so that their prompts have few enough blocks."""
    per_prompt = demand.blocks_per_prompt
    return int(_MAX_BLOCKS / per_prompt) if per_prompt else sys.maxsize


@functools.lru_cache(maxsize=16)
def _compute_warmup(demand: Demand) -> int:
    blocks = demand.draw(_WARMUP_SAMPLE).blocks if demand.has_reuse else None
    return min(blocks.compute_distance(_WARMUP_SHARE), _MAX_WARMUP) if blocks else 0
