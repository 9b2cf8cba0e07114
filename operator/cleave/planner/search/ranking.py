"""Ranks many placements by goodput per resource, pruning those that cannot be best.

Used by the searches of the papers, and where the nodes cannot serve the rate. What is hard: there
are hundreds of placements, and one goodput takes eight simulations. They are tried in the order of
their bounds: one whose bound is not above the best goodput per resource so far is skipped, and one
that fails at that rate is rejected after one simulation. So every placement without a goodput is
worse than the best.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from cleave.planner.problem import Problem
from cleave.planner.search import capacity_bound, goodput
from cleave.planner.search.candidate_placement import CandidatePlacement, build_cell
from cleave.planner.search.context import SearchContext
from cleave.planner.search.goodput import Goodput
from cleave.simulator.fleet import SimulatedFleet


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
