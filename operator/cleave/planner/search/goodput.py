"""The highest rate that a fleet serves within its SLO, with a confidence interval.

DistServe, section 4.1: binary search over simulation trials. What is hard: trials are random
samples. All trials of one search serve the same requests with scaled gaps, so that attainment falls
with the rate as smoothly as possible; where it rises again, the lowest crossing counts and
`is_monotone` is False. The variance between samples is measured with other seeds
(`confirm_goodput`).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from cleave.planner.search import capacity_bound
from cleave.planner.search.trials import Targets, Trials, TrialSpan
from cleave.simulator.fleet import SimulatedEngine, SimulatedFleet
from cleave.simulator.run import PreparedFleet, prepare_fleet

TOLERANCE = 0.01
"""Relative width of the bracket at which bisection ends."""
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)
"""Student's t for a two-sided 95 % interval of 2, 3 ... 12 samples; of more it is a little less."""
_SAMPLE_SLACK = 0.02
"""The sample that is checked first is not the one that a trial counts; allow for the difference."""
_FIRST_STEP = 1.15
"""Factor of the first step from the estimated rate."""
_MAX_GROWTH = 1.2
"""Trials are long enough for rates up to so many times the one that they are made for."""
_CHECKED_FACTORS = (0.5, 0.8, 0.95, 1.05, 1.2, 1.5)
"""Factors on the goodput at which attainment is checked for monotony."""
_MIN_STEP_SHARE = 0.3
"""Smallest distance of a trial from either end of its bracket, as a share of the bracket."""
_NEGLIGIBLE_SHARE = 1 / 256
"""Below this share of the rate bound, goodput is 0."""
_MAX_STEPS = 40


@dataclass(frozen=True, slots=True)
class Goodput:
    """Goodput of one fleet, in req/s."""

    rate: float
    """Highest rate found at which the attainment target is met, at most `Trials.max_rate`; 0: none.
    """
    attainment: float
    """Share of requests that meet both targets at that rate."""
    is_monotone: bool = True
    """False: a rate above one that failed met the target again."""
    interval: tuple[float, float] | None = None
    """95 % confidence interval; None: no other seeds were tried."""


def find_goodput(
    trials: Trials, fleet: SimulatedFleet, targets: Targets, at_least: float = 0.0
) -> Goodput:
    """Find the goodput of `fleet` by bisection, starting at the estimated rate.

    With `at_least`, a fleet that fails at this rate is rejected after one trial (goodput 0),
    because the caller has a better one.
    """
    lengths = trials.get_lengths()
    upper = min(capacity_bound.compute_fleet_rate(fleet, lengths), trials.max_rate)
    if upper <= at_least or not can_meet_targets(trials, fleet, targets):
        return Goodput(0.0, 0.0)
    estimate = capacity_bound.estimate_rate(fleet, lengths, targets.longest_gap_ms)
    guess = max(estimate, at_least * _FIRST_STEP)
    bisection = _Bisection.start(trials, fleet, targets, min(guess, upper))
    if at_least > 0 and not bisection.holds(at_least):
        return Goodput(0.0, bisection.attainments.get(at_least, 0.0))
    return bisection.run(at_least, guess)


def find_goodput_near(
    trials: Trials, fleet: SimulatedFleet, targets: Targets, rate: float
) -> Goodput:
    """The same, starting at a `rate` that is probably close. If it was far below, the trials were
    too short, and a fleet seemed to serve more than in trials that began at its goodput."""
    if rate <= 0:
        return find_goodput(trials, fleet, targets)
    found = _Bisection.start(trials, fleet, targets, rate).run(0.0, rate, 1 + TOLERANCE)
    if found.rate <= rate * _MAX_GROWTH:
        return found
    return find_goodput_near(trials, fleet, targets, found.rate)


def confirm_goodput(
    trials: Trials, fleet: SimulatedFleet, targets: Targets, first: Goodput, seeds: int = 5
) -> Goodput:
    """Mean over `seeds` independent samples, with Student's 95 % interval of that mean. Also tries
    other rates around the mean, to see whether attainment is monotone."""
    samples = [first]
    for number in range(1, seeds + 1):
        other = trials.with_seed(trials.seed + number)
        samples.append(find_goodput_near(other, fleet, targets, samples[-1].rate))
    samples = samples[1:]
    rates = [each.rate for each in samples]
    mean = statistics.fmean(rates)
    half = compute_half_interval(rates)
    return replace(
        first,
        rate=mean,
        attainment=statistics.fmean(each.attainment for each in samples),
        is_monotone=first.is_monotone
        and all(each.is_monotone for each in samples)
        and (not mean or _is_monotone(trials, fleet, targets, mean)),
        interval=(max(mean - half, 0.0), mean + half),
    )


def compute_half_interval(values: Sequence[float]) -> float:
    """Half of Student's 95 % confidence interval of the mean of at least 2 values."""
    return _T_95[min(len(values), 12) - 2] * statistics.stdev(values) / math.sqrt(len(values))


def can_meet_targets(trials: Trials, fleet: SimulatedFleet, targets: Targets) -> bool:
    """Whether enough requests would meet the targets if each had an instance to itself."""
    return all(
        _can_meet_unloaded(trials, alone, [pool.engine for pool in pools])
        for alone, pools in (
            (targets.prefill_only, (*fleet.prefill, *fleet.mixed)),
            (targets.decode_only, (*fleet.decode, *fleet.mixed)),
        )
    )


def _can_meet_unloaded(trials: Trials, targets: Targets, engines: list[SimulatedEngine]) -> bool:
    sample, latencies = trials.get_sample(), (targets.ttft_ms, targets.tpot_ms)
    shares = [
        capacity_bound.compute_unloaded_attainment(engine, sample, *latencies, trials.warmup)
        for engine in engines
    ]
    return max(shares, default=1.0) >= targets.attainment - _SAMPLE_SLACK


def _is_monotone(trials: Trials, fleet: SimulatedFleet, targets: Targets, rate: float) -> bool:
    """Whether attainment falls monotonically from far below to far above `rate`.

    Short trials are enough: they overestimate attainment at high rates, but that alone does not
    make a rate succeed above one that fails.
    """
    long = trials.compute_span(rate, targets)
    span = replace(long, counted=min(long.counted, trials.precision.min_requests))
    is_met = [trials.holds(fleet, rate * factor, targets, span) for factor in _CHECKED_FACTORS]
    return is_met == sorted(is_met, reverse=True)


@dataclass(slots=True)
class _Bisection:
    """One search, with the rates tried so far."""

    trials: Trials
    prepared: PreparedFleet
    targets: Targets
    span: TrialSpan
    upper: float
    """Rate bound: no rate above it can be sustained, although a finite trial may not show that, or
    none above it is tried (`Trials.max_rate`)."""
    attainments: dict[float, float] = field(default_factory=dict)
    """Rate -> attainment."""

    @classmethod
    def start(cls, trials: Trials, fleet: SimulatedFleet, targets: Targets, rate: float) -> Self:
        """A search in which all trials have the length of a trial at `rate`."""
        span = trials.compute_span(rate, targets)
        upper = capacity_bound.compute_fleet_rate(fleet, trials.get_lengths(span.total))
        return cls(trials, prepare_fleet(fleet), targets, span, min(upper, trials.max_rate))

    def run(self, low: float, guess: float, widen: float = _FIRST_STEP) -> Goodput:
        """Widen a bracket around `guess`, then bisect; `low` meets the target or is 0."""
        rate = max(min(guess, self.upper * (1 - TOLERANCE)), low)
        if self.holds(rate):
            while self.holds(high := rate * widen) and len(self.attainments) < _MAX_STEPS:
                rate, widen = high, widen * widen
            return self._narrow(rate, high)
        high = rate
        while (rate := high / widen) > max(low, self.upper * _NEGLIGIBLE_SHARE):
            if self.holds(rate):
                return self._narrow(rate, high)
            high, widen = rate, widen * widen
        return self._narrow(low, high)

    def holds(self, rate: float) -> bool:
        """Whether the attainment target is met at `rate`."""
        if rate > self.upper:
            return False
        if rate not in self.attainments:
            shares = self.trials.measure_shares(
                self.prepared, rate, self.targets, self.span, self._least
            )
            self.attainments[rate] = shares.both
        return self.attainments[rate] >= self.targets.attainment

    def _narrow(self, low: float, high: float) -> Goodput:
        """Bisect between `low`, which meets the target or is 0, and `high`, which fails."""
        high = min(high, self.upper)
        while low > 0 and high - low > TOLERANCE * high:
            middle = self._interpolate(low, high)
            if self.holds(middle):
                low = middle
            else:
                high = middle
        meets = [self.attainments[r] >= self.targets.attainment for r in sorted(self.attainments)]
        is_monotone = meets == sorted(meets, reverse=True)
        return Goodput(low, self.attainments.get(low, 0.0), is_monotone)

    @property
    def _least(self) -> float:
        """Attainment below which `_interpolate` gives the same rate: the smallest distance."""
        missed = 1 - self.targets.attainment
        return self.targets.attainment - missed * (1 - _MIN_STEP_SHARE) / _MIN_STEP_SHARE

    def _interpolate(self, low: float, high: float) -> float:
        """Linear interpolation of the rate at the target, kept away from the bracket's ends."""
        target = self.targets.attainment
        above, below = self.attainments[low] - target, target - self.attainments.get(high, 0.0)
        # Near the flat top of the curve interpolation is poor; the limits keep it close to halving.
        part = above / (above + below) if above + below > 0 else 0.5
        return low + (high - low) * min(max(part, _MIN_STEP_SHARE), 1 - _MIN_STEP_SHARE)
