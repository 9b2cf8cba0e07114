"""The best plan of mixed instances: the baseline that disaggregation has to beat.

Vidur's search (sections 6 and 7.3): parallelism, batching policy, batch size and tokens per step,
coarse to fine. Also the cost of serving one workload with the best configuration of another (Vidur,
fig. 1b).
"""

from collections.abc import Callable, Sequence

from cleave.api.role import Role
from cleave.planner.problem import Problem
from cleave.planner.search import goodput, ranking
from cleave.planner.search.batch_limits import refined
from cleave.planner.search.candidate_placement import Draft, Group, cell_fleet, weight_in
from cleave.planner.search.candidates import Candidate, mixed_instance
from cleave.planner.search.ranking import Rated
from cleave.planner.search.trials import Targets, Trials

_COARSE = (512, 2048)


def optimise(
    problem: Problem,
    trials: Trials,
    candidates: Sequence[Candidate],
    targets: Targets,
    tick: Callable[[], None] = lambda: None,
) -> Rated | None:
    """The mixed instance with most goodput per resource; None: none meets the targets."""

    def best(placements: list[Draft]) -> Rated | None:
        entries = ranking.entries(problem, trials, placements)
        return ranking.best(trials, entries, targets, weight_in(problem), tick)

    return refined(best(_coarse(problem, candidates)), best)


def fewest(
    problem: Problem,
    trials: Trials,
    candidates: Sequence[Candidate],
    targets: Targets,
    tick: Callable[[], None] = lambda: None,
) -> Rated | None:
    """The mixed instance whose replicas for the requested rate need least resources."""

    def least(placements: list[Draft]) -> Rated | None:
        entries = ranking.entries(problem, trials, placements)
        return ranking.fewest(trials, entries, targets, weight_in(problem), problem.rate, tick)

    return refined(least(_coarse(problem, candidates)), least)


def misconfiguration_cost(
    problem: Problem, trials: Trials, targets: Targets, own: Draft, foreign: Draft
) -> float:
    """Resources per request of `foreign`, the best plan of another workload, relative to `own`.

    1: as good as `own`; infinite: it never meets the targets.
    """
    weigh = problem.planning.objective
    rates = [
        goodput.find(trials, cell_fleet(problem, each), targets).rate / each.resources(weigh)
        for each in (own.copied(1), foreign.copied(1))
    ]
    return rates[0] / rates[1] if rates[1] else float("inf")


def _coarse(problem: Problem, candidates: Sequence[Candidate]) -> list[Draft]:
    instances = (
        mixed_instance(problem, candidate, batching)
        for candidate in candidates
        for batching in problem.policies.mixed
    )
    return [
        Draft((Group(Role.MIXED, instance.limited(instance.max_num_seqs, tokens), 1),))
        for instance in instances
        for tokens in _COARSE
    ]
