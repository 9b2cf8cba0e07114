"""The highest rate that a fleet serves within its SLO, with a confidence interval.

DistServe, section 4.1: binary search over simulation trials. What is hard: trials are random
samples. All trials of one search serve the same requests with scaled gaps, so that attainment falls
with the rate as smoothly as possible; where it rises again, the lowest crossing counts and
`is_monotone` is False. The variance between samples is measured with other seeds (`confirm`).
"""

import math
import statistics
from dataclasses import dataclass, field, replace
from typing import Self

from cleave.planner.search import capacity_bound
from cleave.planner.search.trials import Span, Targets, Trials
from cleave.simulator.fleet import Engine, Fleet
from cleave.simulator.run import Prepared, prepare
from cleave.simulator.trace import Trace

TOLERANCE = 0.01
"""Relative width of the bracket at which bisection ends."""
_T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Student's t for a two-sided 95 % interval, by number of samples."""
_SAMPLE_SLACK = 0.02
"""The sample that is checked first is not the one that a trial counts; allow for the difference."""
_WIDEN = 1.15
"""Factor of the first step from the estimated rate."""
_AROUND = (0.5, 0.8, 0.95, 1.05, 1.2, 1.5)
"""Factors on the goodput at which attainment is checked for monotony."""
_EDGE = 0.3
"""Smallest distance of a trial from either end of its bracket, as a share of the bracket."""
_NEGLIGIBLE = 1 / 256
"""Below this share of the rate bound, goodput is 0."""
_MOST_STEPS = 40


@dataclass(frozen=True, slots=True)
class Goodput:
    """Goodput of one fleet, in req/s."""

    rate: float
    """Highest rate found at which the attainment target is met; 0: none."""
    attainment: float
    """Share of requests that meet both targets at that rate."""
    is_monotone: bool = True
    """False: a rate above one that failed met the target again."""
    interval: tuple[float, float] | None = None
    """95 % confidence interval; None: no other seeds were tried."""


def find(
    trials: Trials,
    fleet: Fleet,
    targets: Targets,
    at_least: float = 0.0,
    tolerance: float = TOLERANCE,
) -> Goodput:
    """Find the goodput of `fleet` by bisection, starting at the estimated rate.

    With `at_least`, a fleet that fails at this rate is rejected after one trial (goodput 0),
    because the caller has a better one.
    """
    lengths = trials.lengths()
    upper = capacity_bound.fleet_rate(fleet, lengths)
    if upper <= at_least or not could_hold(trials, fleet, targets):
        return Goodput(0.0, 0.0)
    guess = max(capacity_bound.likely_rate(fleet, lengths, targets.tpot_ms), at_least * _WIDEN)
    bisection = _Bisection.around(trials, fleet, targets, min(guess, upper), tolerance)
    if at_least > 0 and not bisection.holds(at_least):
        return Goodput(0.0, bisection.tried.get(at_least, 0.0))
    return bisection.run(at_least, guess)


def near(
    trials: Trials, fleet: Fleet, targets: Targets, rate: float, tolerance: float = TOLERANCE
) -> Goodput:
    """The same, starting at a `rate` that is probably close."""
    if rate <= 0:
        return find(trials, fleet, targets, tolerance=tolerance)
    first = 1 + tolerance
    return _Bisection.around(trials, fleet, targets, rate, tolerance).run(0.0, rate, first)


def confirm(
    trials: Trials, fleet: Fleet, targets: Targets, first: Goodput, seeds: int = 5
) -> Goodput:
    """Mean over `seeds` independent samples, with Student's 95 % interval of that mean.

    Also tries other rates around the mean, to see whether attainment is monotone.
    """
    samples = [first]
    for number in range(1, seeds + 1):
        other = trials.reseeded(trials.seed + number)
        samples.append(near(other, fleet, targets, samples[-1].rate))
    samples = samples[1:]
    rates = [each.rate for each in samples]
    mean = statistics.fmean(rates)
    half = _T_95[seeds] * statistics.stdev(rates) / math.sqrt(seeds)
    return replace(
        first,
        rate=mean,
        attainment=statistics.fmean(each.attainment for each in samples),
        is_monotone=first.is_monotone
        and all(each.is_monotone for each in samples)
        and (not mean or _falls(trials, fleet, targets, mean)),
        interval=(max(mean - half, 0.0), mean + half),
    )


def could_hold(trials: Trials, fleet: Fleet, targets: Targets) -> bool:
    """Whether enough requests would meet the targets if each had an instance to itself."""
    sample = trials.sample()
    prefill, decode = targets.prefill_only, targets.decode_only
    return _best_alone(
        sample, prefill, [pool.engine for pool in (*fleet.prefill, *fleet.mixed)]
    ) and _best_alone(sample, decode, [pool.engine for pool in (*fleet.decode, *fleet.mixed)])


def _best_alone(sample: Trace, targets: Targets, engines: list[Engine]) -> bool:
    shares = [
        capacity_bound.unloaded_attainment(engine, sample, targets.ttft_ms, targets.tpot_ms)
        for engine in engines
    ]
    return max(shares, default=1.0) >= targets.attainment - _SAMPLE_SLACK


def _falls(trials: Trials, fleet: Fleet, targets: Targets, rate: float) -> bool:
    """Whether attainment falls monotonically from far below to far above `rate`.

    Short trials are enough: they overestimate attainment at high rates, but that alone does not
    make a rate succeed above one that fails.
    """
    long = trials.span(rate, targets)
    span = replace(long, counted=min(long.counted, trials.precision.min_requests))
    is_met = [
        trials.shares(fleet, rate * factor, targets, span).both >= targets.attainment
        for factor in _AROUND
    ]
    return is_met == sorted(is_met, reverse=True)


@dataclass(slots=True)
class _Bisection:
    """One search, with the rates tried so far."""

    trials: Trials
    prepared: Prepared
    targets: Targets
    span: Span
    upper: float
    """Rate bound: no rate above it can be sustained, although a finite trial may not show that."""
    tolerance: float
    tried: dict[float, float] = field(default_factory=dict)
    """Rate -> attainment."""

    @classmethod
    def around(
        cls, trials: Trials, fleet: Fleet, targets: Targets, rate: float, tolerance: float
    ) -> Self:
        """A search in which all trials have the length of a trial at `rate`."""
        span = trials.span(rate, targets)
        upper = capacity_bound.fleet_rate(fleet, trials.lengths(span.total))
        return cls(trials, prepare(fleet), targets, span, upper, tolerance)

    def run(self, low: float, guess: float, widen: float = _WIDEN) -> Goodput:
        """Find a bracket with growing steps from `guess`, then bisect; `low` meets the target or is
        0."""
        rate = max(min(guess, self.upper * (1 - self.tolerance)), low)
        if self.holds(rate):
            while self.holds(high := rate * widen) and len(self.tried) < _MOST_STEPS:
                rate, widen = high, widen * widen
            return self._narrow(rate, high)
        high = rate
        while (rate := high / widen) > max(low, self.upper * _NEGLIGIBLE):
            if self.holds(rate):
                return self._narrow(rate, high)
            high, widen = rate, widen * widen
        return self._narrow(low, high)

    def holds(self, rate: float) -> bool:
        """Whether the attainment target is met at `rate`."""
        if rate > self.upper:
            return False
        if rate not in self.tried:
            shares = self.trials.shares(self.prepared, rate, self.targets, self.span)
            self.tried[rate] = shares.both
        return self.tried[rate] >= self.targets.attainment

    def _narrow(self, low: float, high: float) -> Goodput:
        """Bisect between `low`, which meets the target or is 0, and `high`, which fails."""
        high = min(high, self.upper)
        while low > 0 and high - low > self.tolerance * high:
            middle = self._between(low, high)
            if self.holds(middle):
                low = middle
            else:
                high = middle
        return self._found(low)

    def _between(self, low: float, high: float) -> float:
        """Linear interpolation of the rate at the target, kept away from both ends of the
        bracket."""
        target = self.targets.attainment
        above, below = self.tried[low] - target, target - self.tried.get(high, 0.0)
        # Near the flat top of the curve interpolation is poor; the limits keep it close to halving.
        part = above / (above + below) if above + below > 0 else 0.5
        return low + (high - low) * min(max(part, _EDGE), 1 - _EDGE)

    def _found(self, rate: float) -> Goodput:
        is_met = [self.tried[each] >= self.targets.attainment for each in sorted(self.tried)]
        return Goodput(
            rate=rate,
            attainment=self.tried.get(rate, 0.0),
            is_monotone=is_met == sorted(is_met, reverse=True),
        )
