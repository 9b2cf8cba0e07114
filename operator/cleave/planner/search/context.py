"""What every step of one search shares: the problem, its simulations and targets."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Self

from cleave.api.planning import Disaggregation
from cleave.planner.problem import Problem
from cleave.planner.search.candidate_placement import CandidatePlacement, build_cell
from cleave.planner.search.trials import Precision, Shares, Targets, Trials


@dataclass(frozen=True, slots=True)
class CloseCall:
    """A placement that misses the attainment target by so little that other requests may decide
    otherwise."""

    placement: CandidatePlacement
    share: float
    """Share of requests in time in a long trial."""


@dataclass(frozen=True, slots=True)
class SearchContext:
    """One search of a problem."""

    problem: Problem
    trials: Trials
    targets: Targets
    tick: Callable[[str], None] = lambda _: None
    """Called for each unit of work, with a text for the current step."""
    step: str = ""
    """The text of the step that tries instances."""
    close_calls: list[CloseCall] = field(default_factory=list)
    """Filled by the search."""

    @classmethod
    def from_problem(cls, problem: Problem) -> Self:
        """The problem's own requests and SLO, in short trials."""
        return cls(problem, Trials(problem.demand, problem.seed), Targets.from_slo(problem.slo))

    @property
    def may_disaggregate(self) -> bool:
        """Whether disaggregated placements are searched: where they are requested, or where they
        are not excluded and answers have more than the token that ends the prompt."""
        requested = self.problem.planning.disaggregation
        if requested is Disaggregation.AUTO:
            return self.trials.get_lengths().decode_steps > 0
        return requested is Disaggregation.ALWAYS

    def divide(self, parts: int) -> Iterator["SearchContext"]:
        """Searches for one of so many equal parts of the nodes, at its share of the rate: with as
        many GPUs as it may have, on nodes that it may share with another part, then on whole nodes.
        """
        for rounded in (math.ceil, math.floor):
            problem = self.problem.divide(parts, rounded)
            trials = Trials(problem.demand, problem.seed, self.trials.precision, self.trials.tally)
            yield replace(self, problem=problem, trials=trials, close_calls=[])

    def with_precision(self, precision: Precision) -> "SearchContext":
        """The same with longer or shorter trials."""
        return replace(self, trials=self.trials.with_precision(precision))

    def get_resources(self, placement: CandidatePlacement) -> float:
        """The resources of a placement in the unit of the objective."""
        return placement.get_resources(self.problem.planning.objective)

    def measure_shares(
        self, placement: CandidatePlacement, rate: float, least: float = 0.0
    ) -> Shares:
        """Simulate one cell of `placement` at `rate`, the cell's own share; below `least` the share
        of both targets may be any."""
        span = self.trials.compute_span(rate, self.targets)
        fleet = build_cell(self.problem, placement)
        return self.trials.measure_shares(fleet, rate, self.targets, span, least)
