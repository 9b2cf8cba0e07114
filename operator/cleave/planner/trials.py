"""Simulations of one workload: what share of requests a fleet serves in time at some rate.

Every search step is a trial here, so that all fleets meet the same requests. What is hard: a
simulation begins and ends with empty instances, which flatter it. A trial therefore counts only
requests that arrive after the fleet has filled and before arrivals stop (a request's life under
the targets at both ends is simulated and not counted), and it lasts so long that a small overload
shows: a queue that grows by 1 % of the time outgrows the TTFT target in a hundred targets. Gaps
are scaled so that the drawn rate is the rate that was asked for, not a few per cent beside it.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from cleave.api.deployment import Slo
from cleave.planner.capacity import Lengths
from cleave.simulator.fleet import Fleet
from cleave.simulator.outcome import Outcome
from cleave.simulator.run import Prepared, measure, simulate
from cleave.simulator.trace import Trace
from cleave.traffic.workload import Demand

OVERLOAD = 100.0
"""A trial lasts so many TTFT targets at least."""
_LARGE = 4
"""Where so many times the fewest requests do not last the lives asked for, they are enough: with
many requests at once, chance evens out."""
_MOST_REQUESTS = 200_000
"""Counted requests of the longest trial."""
_LONGEST_DURATION_S = 600.0
"""No trial needs to be longer for the sake of OVERLOAD."""


@dataclass(frozen=True, slots=True)
class Precision:
    """How long trials are."""

    min_requests: int
    """Fewest counted."""
    lives: float
    """Shortest duration, in lives of a request under the targets."""


RANKING = Precision(min_requests=1000, lives=4.0)
"""Enough to compare: all candidates meet the same requests, and their errors are alike. Instances
that are short of memory come out up to a fifth too good, because queues for memory grow slowly."""
CONFIRMED = Precision(min_requests=10_000, lives=10.0)
"""Enough to quote: what is left of that error is a few per cent, and the interval shows it."""


@dataclass(slots=True)
class Tally:
    """What has been simulated."""

    trials: int = 0
    requests: int = 0
    """Those not counted in a share included."""


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request must meet; infinite: not asked for."""

    ttft_ms: float
    tpot_ms: float
    attainment: float

    @classmethod
    def of(cls, slo: Slo) -> Self:
        """As a deployment states them."""
        return cls(slo.ttft_ms, slo.tpot_ms, slo.attainment)

    def scaled(self, scale: float) -> "Targets":
        """Both latencies times `scale`."""
        return replace(self, ttft_ms=self.ttft_ms * scale, tpot_ms=self.tpot_ms * scale)

    @property
    def prefill_only(self) -> "Targets":
        """DistServe's simu_prefill: TTFT alone."""
        return replace(self, tpot_ms=math.inf)

    @property
    def decode_only(self) -> "Targets":
        """DistServe's simu_decode: TPOT alone."""
        return replace(self, ttft_ms=math.inf)


@dataclass(frozen=True, slots=True)
class Shares:
    """Of the counted requests of one trial."""

    both: float
    """Met both targets."""
    ttft: float
    tpot: float


@dataclass(slots=True)
class Trials:
    """Simulates fleets under one demand, and counts what that takes."""

    demand: Demand
    seed: int = 0
    precision: Precision = RANKING
    tally: Tally = field(default_factory=Tally)
    _units: dict[tuple[int, int], Trace] = field(default_factory=dict)
    _lengths: dict[int, Lengths] = field(default_factory=dict)

    def reseeded(self, seed: int) -> "Trials":
        """The same with other requests."""
        return replace(self, seed=seed, _lengths={})

    def at(self, precision: Precision) -> "Trials":
        """The same with longer or shorter trials."""
        return replace(self, precision=precision)

    def span(self, rate: float, targets: Targets) -> "Span":
        """How many requests a trial at `rate` takes."""
        life_s = self._life_ms(targets) / 1000
        overload_s = targets.ttft_ms / 1000 * OVERLOAD if math.isfinite(targets.ttft_ms) else 0.0
        min_requests = self.precision.min_requests
        lives = min(rate * life_s * self.precision.lives, _LARGE * min_requests)
        overload = rate * min(overload_s, _LONGEST_DURATION_S)
        counted = int(min(max(lives, overload, min_requests), _MOST_REQUESTS))
        return Span(ramp=int(min(math.ceil(rate * life_s), counted)), counted=counted)

    def shares(
        self, fleet: Fleet | Prepared, rate: float, targets: Targets, span: "Span"
    ) -> Shares:
        """What share of requests met the targets at `rate`."""
        self._count(span)
        ttft_ms, tpot_ms = measure(fleet, self.trace(span.total, rate), self.seed)
        # nan, a request that never ended, is not below any target.
        in_time = ttft_ms[span.window] <= targets.ttft_ms
        fluent = tpot_ms[span.window] <= targets.tpot_ms
        return Shares(_share(in_time & fluent), _share(in_time), _share(fluent))

    def serve(self, fleet: Fleet | Prepared, rate: float, span: "Span") -> Outcome:
        """All requests of one simulation."""
        self._count(span)
        return simulate(fleet, self.trace(span.total, rate), self.seed)

    def trace(self, num: int, rate: float) -> Trace:
        """`num` requests at exactly `rate`; at other rates the same ones, stretched."""
        unit = self._unit(num)
        return replace(unit, arrival_ms=unit.arrival_ms / rate)

    def lengths(self, num: int | None = None) -> Lengths:
        """Of the requests of a trial of `num`; what bounds are computed from."""
        num_requests = num or self.precision.min_requests
        if num_requests not in self._lengths:
            self._lengths[num_requests] = Lengths.of(self._unit(num_requests))
        return self._lengths[num_requests]

    def sample(self) -> Trace:
        """Requests of a short trial, at one per second."""
        return self._unit(self.precision.min_requests)

    def _count(self, span: "Span") -> None:
        self.tally.trials += 1
        self.tally.requests += span.total

    def _unit(self, num: int) -> Trace:
        unit = self._units.get((self.seed, num))
        if unit is None:
            drawn = self.demand.draw(num, 1.0, self.seed)
            span_ms = float(drawn.arrival_ms[-1])
            stretch = num * 1000.0 / span_ms if span_ms else 1.0
            unit = replace(drawn, arrival_ms=drawn.arrival_ms * stretch)
            self._units[self.seed, num] = unit
        return unit

    def _life_ms(self, targets: Targets) -> float:
        lengths = self.lengths()
        ttft_ms = targets.ttft_ms if math.isfinite(targets.ttft_ms) else 0.0
        tpot_ms = targets.tpot_ms if math.isfinite(targets.tpot_ms) else 0.0
        return ttft_ms + tpot_ms * lengths.decode_passes


@dataclass(frozen=True, slots=True)
class Span:
    """The requests of a trial, in order of arrival."""

    ramp: int
    """Not counted, at the beginning and again at the end."""
    counted: int

    @property
    def total(self) -> int:
        """All that are simulated."""
        return self.counted + 2 * self.ramp

    @property
    def window(self) -> slice:
        """Of the counted ones among all."""
        return slice(self.ramp, self.ramp + self.counted)


def _share(is_met: NDArray[np.bool_]) -> float:
    return float(np.count_nonzero(is_met)) / len(is_met)
