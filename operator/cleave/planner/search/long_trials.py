"""Long trials, which decide what short ones only exclude, and the mean over several samples.

Called by the search for placements that hold in short trials, and by predictions. What is hard:
instances that are short of memory serve one sample of requests in time and of another one hardly
half, so that one sample says little, and the one in which a placement was found flatters it. The
samples here are none of the search's.
"""

import functools
import math
import operator

import numpy as np

from cleave.planner.plan import WIDE_ERROR
from cleave.planner.search.candidate_placement import CandidatePlacement, build_deployed_cell
from cleave.planner.search.context import CloseCall, SearchContext
from cleave.planner.search.goodput import compute_half_interval
from cleave.planner.search.part import PHASE_SLACK
from cleave.planner.search.trials import (
    CONFIRMATION_PRECISION,
    SampledService,
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
"""Added to the seed of the problem; other trials add less."""
_FEWEST, _MOST = 8, 40
"""Samples. A fleet that is short of memory may collapse in one of six; three that did not agree so
well that no more were drawn, and predictions were up to eight points too high."""


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
    trials: Trials, fleet: SimulatedFleet, rate: float, span: TrialSpan, targets: Targets
) -> SampledService:
    """Serve samples of requests until the mean is good enough, or surely above or below the target,
    or there are enough of them."""
    key = fleet, rate, span, targets, trials.seed
    if key in trials.services:
        return trials.services[key]
    shares: list[float] = []
    latencies: list[tuple[Times, Times]] = []
    itl: list[InterTokenLatencies] = []
    error = enough = math.inf
    while len(shares) < _FEWEST or (error > enough and len(shares) < _MOST):
        other = trials.with_seed(trials.seed + _FIRST_SEED + len(shares))
        outcome = other.simulate(fleet, rate, span)
        ttft_ms, tpot_ms = outcome.ttft_ms[span.window], outcome.tpot_ms[span.window]
        latencies.append((ttft_ms, tpot_ms))
        itl.append(outcome.itl)
        shares.append(float(np.mean((ttft_ms <= targets.ttft_ms) & (tpot_ms <= targets.tpot_ms))))
        error = compute_half_interval(shares) if len(shares) > 1 else math.inf
        enough = max(WIDE_ERROR, abs(float(np.mean(shares)) - targets.attainment))
    ttft_ms, tpot_ms = map(np.concatenate, zip(*latencies, strict=True))
    attainment, tokens = float(np.mean(shares)), functools.reduce(operator.add, itl)
    ttft = float(np.mean(ttft_ms <= targets.ttft_ms))
    tpot = float(np.mean(tpot_ms <= targets.tpot_ms))
    own = targets.scale_own(ttft, tpot, tokens.compute_share(targets.itl_p99_ms))
    share = min(attainment, *own)
    found = SampledService(attainment, error, share, ttft, tpot, ttft_ms, tpot_ms, tokens)
    return trials.services.setdefault(key, found)


def compute_least(attainment: float) -> float:
    """Attainment below which a trial may end: one phase alone misses the target by then."""
    return max(attainment - (PHASE_SLACK + _MARGIN) * (1 - attainment), 0.0)


def misses_by_decode(shares: Shares, attainment: float) -> bool:
    """Whether decode instances alone miss the target, with any number of prefill instances."""
    return shares.slow >= (1 + PHASE_SLACK) * (1 - attainment)
