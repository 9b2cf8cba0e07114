"""Long trials, which decide what short ones only exclude, and the mean over several of them.

Called by the search for placements that hold in short trials. What is hard: instances that are
short of memory serve one sample of requests in time and of another one hardly half, so that one
sample is not enough where it leaves no margin.
"""

from dataclasses import replace

from cleave.planner.search.candidate_placement import CandidatePlacement, build_deployed_cell
from cleave.planner.search.context import CloseCall, SearchContext
from cleave.planner.search.part import PHASE_SLACK
from cleave.planner.search.trials import CONFIRMATION_PRECISION, Shares

_CLOSE_SHARE = 0.01
"""A placement that misses the attainment target by less than this is named."""
_SAMPLES = 3
"""Samples of requests whose mean decides ..."""
_CLEAR_MARGIN = 0.75
"""... where one does not leave this share of what may be late."""
_MARGIN = 0.1
"""A trial goes on a little, so that rounding does not hide that a phase misses the target."""


def holds(search: SearchContext, placement: CandidatePlacement) -> bool:
    """Whether it serves the rate in a long trial, and with other requests. If nearly, it is
    noted."""
    share, attainment = measure_long(search, placement).both, search.targets.attainment
    return share >= attainment and measure_mean(search, placement, share) >= attainment


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


def measure_mean(search: SearchContext, placement: CandidatePlacement, first: float) -> float:
    """The mean share over several long trials, of which one showed `first`; that alone where it
    leaves a margin, or what is left of it where roles flip if that is too little."""
    long, attainment = search.with_precision(CONFIRMATION_PRECISION), search.targets.attainment
    deployed = _measure_deployed(long, placement, first)
    if deployed < attainment:
        return deployed
    if first >= attainment + _CLEAR_MARGIN * (1 - attainment):
        return first
    total, rate, least = first, search.problem.rate / placement.copies, attainment - _CLOSE_SHARE
    for left in reversed(range(_SAMPLES - 1)):
        other = replace(long, trials=long.trials.with_seed(long.trials.seed + left + 1))
        needed = max(_SAMPLES * least - total - left, 0.0)
        total += (share := other.measure_shares(placement, rate, needed).both)
        if share < needed:
            return 0.0
    if least < (mean := total / _SAMPLES) < attainment:
        search.close_calls.append(CloseCall(placement, mean))
    return mean


def _measure_deployed(search: SearchContext, placement: CandidatePlacement, fixed: float) -> float:
    """The share with roles that flip as gateways flip them; `fixed` is that without flips. If it is
    nearly enough, that is noted."""
    fleet, attainment = build_deployed_cell(search.problem, placement, 0), search.targets.attainment
    if fleet.flipping is None:
        return fixed
    rate = search.problem.rate / placement.copies
    span = search.trials.compute_span(rate, search.targets)
    least = attainment - _CLOSE_SHARE
    share = search.trials.measure_shares(fleet, rate, search.targets, span, least).both
    if least < share < attainment:
        search.close_calls.append(CloseCall(placement, share))
    return share


def compute_least(attainment: float) -> float:
    """Attainment below which a trial may end: one phase alone misses the target by then."""
    return max(attainment - (PHASE_SLACK + _MARGIN) * (1 - attainment), 0.0)


def misses_by_decode(shares: Shares, attainment: float) -> bool:
    """Whether decode instances alone miss the target, with any number of prefill instances."""
    return shares.slow >= (1 + PHASE_SLACK) * (1 - attainment)
