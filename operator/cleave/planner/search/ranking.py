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
from cleave.planner.search.candidate_placement import CandidatePlacement, build_cell_fleet
from cleave.planner.search.goodput import Goodput
from cleave.planner.search.trials import Targets, Trials
from cleave.simulator.fleet import SimulatedFleet
from cleave.simulator.run import prepare_fleet

_RELATIVE_TOLERANCE = 1e-9

ResourceFunction = Callable[[CandidatePlacement], float]
"""Returns the resources of a placement in the unit of the objective."""


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


def find_best(
    trials: Trials,
    tried: Iterable[BoundedPlacement],
    targets: Targets,
    weigh: ResourceFunction,
    tick: Callable[[], None] = lambda: None,
) -> RankedPlacement | None:
    """The placement with most goodput per resource; None: none meets the targets at any rate.

    `tick` is called once per entry. Among equals, the smaller placement wins.
    """
    winner: RankedPlacement | None = None
    ordered = sorted(
        ((each.bound / weigh(each.placement), -weigh(each.placement), each) for each in tried),
        key=lambda item: item[:2],
        reverse=True,
    )
    for bound, _, entry in ordered:
        tick()
        best_ratio = winner.per_resource if winner else 0.0
        if bound <= best_ratio:
            continue
        weight = weigh(entry.placement)
        rated = goodput.find_goodput(trials, entry.fleet, targets, at_least=best_ratio * weight)
        if rated.rate / weight > best_ratio:
            winner = RankedPlacement(entry.placement, rated, rated.rate / weight)
    return winner


def find_smallest(
    trials: Trials,
    tried: Iterable[BoundedPlacement],
    targets: Targets,
    weigh: ResourceFunction,
    rate: float,
    tick: Callable[[], None] = lambda: None,
) -> RankedPlacement | None:
    """The placement of which n = ceil(rate / goodput) copies need least resources; its goodput is
    set to rate / n.

    At low rates that is not the one with most goodput per resource, which may be far too large.
    None: none meets the targets. Cheaper than `find_best`: a placement only has to serve its share
    of the rate with so few copies that they need less than the best so far.
    """
    winner: RankedPlacement | None = None
    ordered = sorted(
        ((math.ceil(rate / each.bound) * weigh(each.placement), each) for each in tried),
        key=lambda item: (item[0], weigh(item[1].placement)),
    )
    for optimistic, entry in ordered:
        tick()
        weight = weigh(entry.placement)
        limit = _compute_resources(winner, weigh, rate)
        if optimistic >= limit * (1 - _RELATIVE_TOLERANCE):
            continue
        max_copies = math.ceil(limit / weight) - 1 if math.isfinite(limit) else None
        copies = _count_copies(trials, entry, targets, rate, max_copies)
        if copies is not None:
            shared = Goodput(rate / copies, targets.attainment)
            winner = RankedPlacement(entry.placement, shared, shared.rate / weight)
    return winner


def _compute_resources(
    winner: RankedPlacement | None, weigh: ResourceFunction, rate: float
) -> float:
    if winner is None:
        return math.inf
    return round(rate / winner.goodput.rate) * weigh(winner.placement)


def _count_copies(
    trials: Trials, entry: BoundedPlacement, targets: Targets, rate: float, max_copies: int | None
) -> int | None:
    """Fewest copies, at most `max_copies`, that together serve the rate; None: that many do not."""
    if not goodput.can_meet_targets(trials, entry.fleet, targets):
        return None
    if max_copies is None:
        served = goodput.find_goodput(trials, entry.fleet, targets).rate
        return math.ceil(rate / served) if served else None
    prepared = prepare_fleet(entry.fleet)

    def holds(copies: int) -> bool:
        share = rate / copies
        span = trials.compute_span(share, targets)
        return trials.measure_shares(prepared, share, targets, span).both >= targets.attainment

    low, high = math.ceil(rate / entry.bound) - 1, max_copies
    if not holds(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def bound_placements(
    problem: Problem,
    trials: Trials,
    placements: Iterable[CandidatePlacement],
    lay_out: Callable[[Problem, CandidatePlacement], SimulatedFleet] = build_cell_fleet,
) -> list[BoundedPlacement]:
    """Placements with the rate bounds of their fleets."""
    lengths = trials.get_lengths()
    fleets = [(placement, lay_out(problem, placement)) for placement in placements]
    return [
        BoundedPlacement(placement, fleet, capacity_bound.compute_fleet_rate(fleet, lengths))
        for placement, fleet in fleets
    ]
