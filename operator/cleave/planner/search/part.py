"""A part of placements: equal instances or cells, and the fewest of them that may be enough.

What is hard: cost. Families of placements share their parts, so that what a bound or a simulation
of one phase alone excludes is excluded for all of them, as in Algorithm 1. Without the other phase
a request waits for less, so a part that misses the targets alone misses them in a pair; beside
prefill instances that queue, requests reach decode instances a little more evenly, so what is
almost enough is not excluded.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property

from cleave.planner.search import capacity_bound, goodput
from cleave.planner.search.candidate_placement import CandidatePlacement, build_cell
from cleave.planner.search.context import SearchContext

PHASE_SLACK = 1.0
"""A phase alone may miss this share of what may be late, and a pair still meet the target."""


@dataclass(eq=False)
class PlacementPart:
    """Equal instances of one role, or equal cells, in any numbers."""

    search: SearchContext
    unit: CandidatePlacement
    """One of them."""
    least: int = field(init=False)
    """Fewest that may be enough; it grows."""
    estimate: int = field(init=False)
    """How many are probably enough."""
    price: float = field(init=False)
    """Resources of each."""
    _enough: int | None = None
    """Fewest that a trial has not excluded."""

    def __post_init__(self) -> None:
        search, fleet = self.search, build_cell(self.search.problem, self.unit)
        rate, trials = search.problem.rate, search.trials
        lengths = trials.get_lengths(trials.compute_span(rate, search.targets).total)
        bound = capacity_bound.compute_fleet_rate(fleet, lengths)
        likely = capacity_bound.estimate_rate(fleet, lengths, search.targets.longest_gap_ms)
        self.least = max(math.ceil(rate / bound), 1)
        self.estimate = max(math.ceil(rate / likely), self.least)
        self.price = search.get_resources(self.unit)

    @cached_property
    def may_hold(self) -> bool:
        """Whether enough requests would be in time if each had an instance to itself."""
        fleet = build_cell(self.search.problem, self.unit)
        return goodput.can_meet_targets(self.search.trials, fleet, self.search.targets)

    def narrow(self, limit: int) -> bool:
        """Find `least` by trials of this phase alone; False: it is above `limit`."""
        high = self._enough or min(self.estimate, limit)
        while self._enough is None and self.least <= limit:
            if self._may_suffice(high):
                self._enough = high
            else:
                self.least, high = high + 1, min(high + high // 4 + 1, limit)
        while self._enough is not None and self.least < self._enough <= limit:
            middle = (self.least + self._enough) // 2
            if self._may_suffice(middle):
                self._enough = middle
            else:
                self.least = middle + 1
        return self.least <= limit

    def _may_suffice(self, number: int) -> bool:
        search, attainment = self.search, self.search.targets.attainment
        alone = self.unit.change_replicas({self.unit.groups[0].role: number - 1})
        least = max(attainment - PHASE_SLACK * (1 - attainment), 0.0)
        return search.measure_shares(alone, search.problem.rate, least).both >= least
