"""The best plan of mixed instances: the baseline that disaggregation has to beat.

Vidur's search (sections 6 and 7.3): parallelism, batching policy, batch size and tokens per step,
coarse to fine. Also the cost of serving one workload with the best configuration of another (Vidur,
fig. 1b).
"""

from collections.abc import Callable, Sequence

from cleave.api.role import Role
from cleave.planner.problem import Problem
from cleave.planner.search import goodput, ranking
from cleave.planner.search.batch_limits import refine
from cleave.planner.search.candidate_placement import (
    CandidatePlacement,
    InstanceGroup,
    build_cell_fleet,
    make_resource_function,
)
from cleave.planner.search.candidates import Candidate, build_mixed_instance
from cleave.planner.search.ranking import RankedPlacement
from cleave.planner.search.trials import Targets, Trials

_COARSE_NUM_BATCHED_TOKENS = (512, 2048)


def optimize(
    problem: Problem,
    trials: Trials,
    candidates: Sequence[Candidate],
    targets: Targets,
    tick: Callable[[], None] = lambda: None,
) -> RankedPlacement | None:
    """The mixed instance with most goodput per resource; None: none meets the targets."""

    def best(placements: list[CandidatePlacement]) -> RankedPlacement | None:
        entries = ranking.bound_placements(problem, trials, placements)
        return ranking.find_best(trials, entries, targets, make_resource_function(problem), tick)

    return refine(best(_list_coarse(problem, candidates)), best)


def find_smallest(
    problem: Problem,
    trials: Trials,
    candidates: Sequence[Candidate],
    targets: Targets,
    tick: Callable[[], None] = lambda: None,
) -> RankedPlacement | None:
    """The mixed instance whose replicas for the requested rate need least resources."""

    def least(placements: list[CandidatePlacement]) -> RankedPlacement | None:
        entries = ranking.bound_placements(problem, trials, placements)
        return ranking.find_smallest(
            trials, entries, targets, make_resource_function(problem), problem.rate, tick
        )

    return refine(least(_list_coarse(problem, candidates)), least)


def compute_misconfiguration_cost(
    problem: Problem,
    trials: Trials,
    targets: Targets,
    own: CandidatePlacement,
    foreign: CandidatePlacement,
) -> float:
    """Resources per request of `foreign`, the best plan of another workload, relative to `own`.

    1: as good as `own`; infinite: it never meets the targets.
    """
    weigh = problem.planning.objective
    rates = [
        goodput.find_goodput(trials, build_cell_fleet(problem, each), targets).rate
        / each.get_resources(weigh)
        for each in (own.with_copies(1), foreign.with_copies(1))
    ]
    return rates[0] / rates[1] if rates[1] else float("inf")


def _list_coarse(problem: Problem, candidates: Sequence[Candidate]) -> list[CandidatePlacement]:
    instances = (
        build_mixed_instance(problem, candidate, batching)
        for candidate in candidates
        for batching in problem.policies.mixed
    )
    return [
        CandidatePlacement(
            (InstanceGroup(Role.MIXED, instance.with_limits(instance.max_num_seqs, tokens), 1),)
        )
        for instance in instances
        for tokens in _COARSE_NUM_BATCHED_TOKENS
    ]
