"""Long trials, which decide what short ones only exclude, and the mean over several samples.

Called by the search for placements that hold in short trials, and by predictions. What is hard:
instances that are short of memory serve one sample of requests in time and of another one hardly
half, so that one sample says little, and the one in which a placement was found flatters it. The
samples here are none of the search's.
"""

import functools
import math
import operator
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from cleave.planner.plan import WIDE_ERROR
from cleave.planner.search.candidate_placement import CandidatePlacement, build_deployed_cell
from cleave.planner.search.context import CloseCall, SearchContext
from cleave.planner.search.goodput import compute_half_interval
from cleave.planner.search.part import PHASE_SLACK
from cleave.planner.search.trials import (
    CONFIRMATION_PRECISION,
    ServiceSample,
    Shares,
    Targets,
    Trials,
    TrialSpan,
)
from cleave.simulator.fleet import SimulatedFleet
from cleave.simulator.outcome import InterTokenLatencies, Times

_CLOSE_SHARE = 0.01
"""A placement that misses the attainment target by less than this is named."""
_MARGIN = 0.1
"""A trial goes on a little, so that rounding does not hide that a phase misses the target."""
_FIRST_SEED = 101
"""Added to the seed of the problem and its fingerprint; other trials add less, without this."""
_FEWEST = 4
"""Samples."""
_FINEST_ERROR = 0.002
"""Half of the confidence interval that is enough for any target."""
_MOST_DECIDING, _MOST_SHOWN = 400_000, 1_000_000
"""Requests of all samples; a sample has 10,000 or more, and of more the shares vary less."""


@dataclass(frozen=True, slots=True)
class SampledService:
    """What a fleet does with several samples of requests."""

    attainment: float
    """Mean share of the requests that meet both targets."""
    error: float
    """Half of its 95 % confidence interval."""
    share: float
    """`attainment`; less where a target of its own is met worse, see `Targets.scale_own`."""
    ttft_share: float
    """Share of the requests that meet the TTFT target, whatever their TPOT."""
    tpot_share: float
    ttft_ms: Times
    """Of the requests of all samples."""
    tpot_ms: Times
    itl: InterTokenLatencies

    @classmethod
    def summarize(cls, samples: Sequence[ServiceSample], targets: Targets) -> Self:
        """The means of at least two samples."""
        shares = [each.share for each in samples]
        attainment, error = statistics.fmean(shares), compute_half_interval(shares)
        tokens = functools.reduce(operator.add, (each.itl for each in samples))
        ttft_ms = np.concatenate([each.ttft_ms for each in samples])
        tpot_ms = np.concatenate([each.tpot_ms for each in samples])
        ttft = float(np.mean(ttft_ms <= targets.ttft_ms))
        tpot = float(np.mean(tpot_ms <= targets.tpot_ms))
        own = targets.scale_own(ttft, tpot, tokens.compute_share(targets.itl_p99_ms))
        share = min(attainment, *own)
        return cls(attainment, error, share, ttft, tpot, ttft_ms, tpot_ms, tokens)


def holds(search: SearchContext, placement: CandidatePlacement) -> bool:
    """Whether it serves the rate in a long trial, and with other requests. If nearly, it is
    noted."""
    share, attainment = measure_long(search, placement).both, search.targets.attainment
    return share >= attainment and measure_mean(search, placement) >= attainment


def measure_long(
    search: SearchContext, placement: CandidatePlacement, known: Shares | None = None
) -> Shares:
    """The shares in a long trial, `known` if not None. If they are nearly enough, that is noted; if
    less, they may be any."""
    long, attainment = search.with_precision(CONFIRMATION_PRECISION), search.targets.attainment
    least = compute_least(attainment)
    shares = known or long.measure_shares(placement, search.problem.rate / placement.copies, least)
    if attainment - _CLOSE_SHARE < shares.both < attainment:
        search.close_calls.append(CloseCall(placement, shares.both))
    return shares


def measure_mean(search: SearchContext, placement: CandidatePlacement) -> float:
    """The mean share over several samples of requests, with roles that flip as gateways flip them.
    If it is nearly enough, that is noted."""
    trials = search.trials.with_precision(CONFIRMATION_PRECISION)
    fleet, rate = build_deployed_cell(search.problem, placement, 0), search.problem.rate
    rate, attainment = rate / placement.copies, search.targets.attainment
    span = trials.compute_span(rate, search.targets)
    mean = sample_service(trials, fleet, rate, span, search.targets).share
    if attainment - _CLOSE_SHARE < mean < attainment:
        search.close_calls.append(CloseCall(placement, mean))
    return mean


def sample_service(
    trials: Trials,
    fleet: SimulatedFleet,
    rate: float,
    span: TrialSpan,
    targets: Targets,
    *,
    is_shown: bool = False,
) -> SampledService:
    """Serve samples of requests until their mean is known within a point, or there are enough. To
    decide, it is enough that it is surely above or below the target; that is no figure to show, as
    fleets for which one stops early are those whose first samples flatter them."""
    key = fleet, rate, span, targets, trials.seed
    samples = trials.samples.setdefault(key, [])
    first = trials.seed + trials.fingerprint + _FIRST_SEED
    most = math.ceil((_MOST_SHOWN if is_shown else _MOST_DECIDING) / span.total)
    while not _are_enough(samples, most, targets.attainment, is_shown=is_shown):
        outcome = trials.with_seed(first + len(samples)).simulate(fleet, rate, span)
        ttft_ms, tpot_ms = outcome.ttft_ms[span.window], outcome.tpot_ms[span.window]
        samples.append(ServiceSample(ttft_ms, tpot_ms, outcome.itl, targets))
    return SampledService.summarize(samples, targets)


def _are_enough(
    samples: Sequence[ServiceSample], most: int, attainment: float, *, is_shown: bool
) -> bool:
    """Whether the mean would be known even if one more sample missed as many more requests as may
    be missed at all: a fleet that is short of memory may collapse in one of many, which equal
    samples so far do not exclude."""
    if len(samples) < _FEWEST:
        return False
    shares = [each.least_share for each in samples]
    mean = statistics.fmean(shares)
    error = compute_half_interval([*shares, mean - (1 - attainment)])
    # A point of 10 % that may be late; of 1 % as much would be all of it.
    enough = max(WIDE_ERROR * (1 - attainment) / 0.1, _FINEST_ERROR)
    if not is_shown:
        enough = max(enough, abs(mean - attainment))
    return error <= enough or len(samples) >= most


def compute_least(attainment: float) -> float:
    """Attainment below which a trial may end: one phase alone misses the target by then."""
    return max(attainment - (PHASE_SLACK + _MARGIN) * (1 - attainment), 0.0)


def misses_by_decode(shares: Shares, attainment: float) -> bool:
    """Whether decode instances alone miss the target, with any number of prefill instances."""
    return shares.slow >= (1 + PHASE_SLACK) * (1 - attainment)
