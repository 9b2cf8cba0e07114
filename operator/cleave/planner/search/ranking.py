"""Ranks many placements by goodput per resource, pruning those that cannot be best.

Used by both placement algorithms and by the colocated search. What is hard: there are hundreds of
placements, and one goodput takes eight simulations. They are tried in the order of their bounds:
one whose bound is not above the best goodput per resource so far is skipped, and one that fails at
that rate is rejected after one simulation. So every placement without a goodput is worse than the
best.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cleave.planner.problem import Problem
from cleave.planner.search import capacity_bound, goodput
from cleave.planner.search.candidate_placement import CandidatePlacement, build_cell
from cleave.planner.search.context import SearchContext
from cleave.planner.search.goodput import Goodput
from cleave.simulator.fleet import SimulatedFleet
from cleave.simulator.run import prepare_fleet

_RELATIVE_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class RankedPlacement:
    """A placement with its goodput."""

    placement: CandidatePlacement
    goodput: Goodput
    """Goodput of one cell."""
    per_resource: float
    """Goodput divided by the resources of the placement."""


@dataclass(frozen=True, slots=True)
class BoundedPlacement:
    """A placement that may be tried, with the fleet that simulates it."""

    placement: CandidatePlacement
    fleet: SimulatedFleet
    bound: float
    """Upper bound of its goodput."""
    resources: float
    """In the unit of the objective."""


Choice = Callable[[SearchContext, Iterable[BoundedPlacement]], RankedPlacement | None]
"""`find_best` or `find_smallest`."""


def find_best(search: SearchContext, tried: Iterable[BoundedPlacement]) -> RankedPlacement | None:
    """The placement with most goodput per resource; None: none meets the targets at any rate. Ticks
    once per entry. Among equals, the smaller placement wins."""
    winner: RankedPlacement | None = None
    for entry in sorted(tried, key=lambda each: (-each.bound / each.resources, each.resources)):
        search.tick(search.step)
        best_ratio = winner.per_resource if winner else 0.0
        if entry.bound / entry.resources <= best_ratio:
            continue
        at_least = best_ratio * entry.resources
        rated = goodput.find_goodput(search.trials, entry.fleet, search.targets, at_least)
        if rated.rate / entry.resources > best_ratio:
            winner = RankedPlacement(entry.placement, rated, rated.rate / entry.resources)
    return winner


def find_smallest(
    search: SearchContext, tried: Iterable[BoundedPlacement]
) -> RankedPlacement | None:
    """The placement of which n = ceil(rate / goodput) copies need least resources; its goodput is
    set to rate / n.

    At low rates that is not the one with most goodput per resource, which may be far too large.
    None: none meets the targets. Cheaper than `find_best`: a placement only has to serve its share
    of the rate with so few copies that they need less than the best so far.
    """
    winner: RankedPlacement | None = None
    rate, limit = search.problem.rate, math.inf
    ordered = sorted(
        ((max(math.ceil(rate / each.bound), 1) * each.resources, each) for each in tried),
        key=lambda item: (item[0], item[1].resources),
    )
    for optimistic, entry in ordered:
        search.tick(search.step)
        if optimistic >= limit * (1 - _RELATIVE_TOLERANCE):
            continue
        max_copies = math.ceil(limit / entry.resources) - 1 if winner else None
        if (copies := _count_copies(search, entry, max_copies)) is not None:
            shared = Goodput(rate / copies, search.targets.attainment)
            winner = RankedPlacement(entry.placement, shared, shared.rate / entry.resources)
            limit = copies * entry.resources
    return winner


def _count_copies(search: SearchContext, entry: BoundedPlacement, limit: int | None) -> int | None:
    """Fewest copies, at most `limit`, that together serve the rate; None: that many do not."""
    trials, targets, rate = search.trials, search.targets, search.problem.rate
    if not goodput.can_meet_targets(trials, entry.fleet, targets):
        return None
    if limit is None:
        served = goodput.find_goodput(trials, entry.fleet, targets).rate
        return math.ceil(rate / served) if served else None
    prepared = prepare_fleet(entry.fleet)

    def holds(copies: int) -> bool:
        share = rate / copies
        span = trials.compute_span(share, targets)
        return trials.holds(prepared, share, targets, span)

    low, high = max(math.ceil(rate / entry.bound) - 1, 0), limit
    if not holds(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def bound_placements(
    search: SearchContext,
    placements: Iterable[CandidatePlacement],
    lay_out: Callable[[Problem, CandidatePlacement], SimulatedFleet] = build_cell,
) -> list[BoundedPlacement]:
    """Placements with the rate bounds of their fleets."""
    lengths = search.trials.get_lengths()
    fleets = [(placement, lay_out(search.problem, placement)) for placement in placements]
    bounds = [capacity_bound.compute_fleet_rate(fleet, lengths) for _, fleet in fleets]
    return [
        BoundedPlacement(placement, fleet, bound, search.get_resources(placement))
        for (placement, fleet), bound in zip(fleets, bounds, strict=True)
    ]
