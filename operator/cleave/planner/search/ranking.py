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
from cleave.planner.search.candidate_placement import Draft, cell_fleet
from cleave.planner.search.goodput import Goodput
from cleave.planner.search.trials import Targets, Trials
from cleave.simulator.fleet import Fleet
from cleave.simulator.run import prepare

_EQUAL = 1e-9

Weigh = Callable[[Draft], float]
"""Returns the resources of a placement in the unit of the objective."""


@dataclass(frozen=True, slots=True)
class Rated:
    """A placement with its goodput."""

    draft: Draft
    goodput: Goodput
    """Goodput of one cell."""
    per_resource: float
    """Goodput divided by the resources of the placement."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A placement that may be tried, with the fleet that simulates it."""

    draft: Draft
    fleet: Fleet
    bound: float
    """Upper bound of its goodput."""


def best(
    trials: Trials,
    tried: Iterable[Entry],
    targets: Targets,
    weigh: Weigh,
    tick: Callable[[], None] = lambda: None,
) -> Rated | None:
    """The placement with most goodput per resource; None: none meets the targets at any rate.

    `tick` is called once per entry. Among equals, the smaller placement wins.
    """
    winner: Rated | None = None
    ordered = sorted(
        ((each.bound / weigh(each.draft), -weigh(each.draft), each) for each in tried),
        key=lambda item: item[:2],
        reverse=True,
    )
    for bound, _, entry in ordered:
        tick()
        best_ratio = winner.per_resource if winner else 0.0
        if bound <= best_ratio:
            continue
        weight = weigh(entry.draft)
        rated = goodput.find(trials, entry.fleet, targets, at_least=best_ratio * weight)
        if rated.rate / weight > best_ratio:
            winner = Rated(entry.draft, rated, rated.rate / weight)
    return winner


def fewest(
    trials: Trials,
    tried: Iterable[Entry],
    targets: Targets,
    weigh: Weigh,
    rate: float,
    tick: Callable[[], None] = lambda: None,
) -> Rated | None:
    """The placement of which n = ceil(rate / goodput) copies need least resources; its goodput is
    set to rate / n.

    At low rates that is not the one with most goodput per resource, which may be far too large.
    None: none meets the targets. Cheaper than `best`: a placement only has to serve its share of
    the rate with so few copies that they need less than the best so far.
    """
    winner: Rated | None = None
    ordered = sorted(
        ((math.ceil(rate / each.bound) * weigh(each.draft), each) for each in tried),
        key=lambda item: (item[0], weigh(item[1].draft)),
    )
    for optimistic, entry in ordered:
        tick()
        weight = weigh(entry.draft)
        limit = _taken(winner, weigh, rate)
        if optimistic >= limit * (1 - _EQUAL):
            continue
        max_copies = math.ceil(limit / weight) - 1 if math.isfinite(limit) else None
        copies = _copies(trials, entry, targets, rate, max_copies)
        if copies is not None:
            shared = Goodput(rate / copies, targets.attainment)
            winner = Rated(entry.draft, shared, shared.rate / weight)
    return winner


def _taken(winner: Rated | None, weigh: Weigh, rate: float) -> float:
    if winner is None:
        return math.inf
    return round(rate / winner.goodput.rate) * weigh(winner.draft)


def _copies(
    trials: Trials, entry: Entry, targets: Targets, rate: float, max_copies: int | None
) -> int | None:
    """Fewest copies, at most `max_copies`, that together serve the rate; None: that many do not."""
    if not goodput.could_hold(trials, entry.fleet, targets):
        return None
    if max_copies is None:
        served = goodput.find(trials, entry.fleet, targets).rate
        return math.ceil(rate / served) if served else None
    prepared = prepare(entry.fleet)

    def holds(copies: int) -> bool:
        share = rate / copies
        span = trials.span(share, targets)
        return trials.shares(prepared, share, targets, span).both >= targets.attainment

    low, high = math.ceil(rate / entry.bound) - 1, max_copies
    if not holds(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def entries(
    problem: Problem,
    trials: Trials,
    placements: Iterable[Draft],
    lay_out: Callable[[Problem, Draft], Fleet] = cell_fleet,
) -> list[Entry]:
    """Placements with the rate bounds of their fleets."""
    lengths = trials.lengths()
    fleets = [(placement, lay_out(problem, placement)) for placement in placements]
    return [
        Entry(placement, fleet, capacity_bound.fleet_rate(fleet, lengths))
        for placement, fleet in fleets
    ]
