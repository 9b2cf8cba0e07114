"""The best plan of mixed instances: the baseline that disaggregation has to beat.

Vidur's search (sections 6 and 7.3): parallelism, batching policy, batch size and tokens per step,
coarse to fine. Also the cost of serving one workload with the best configuration of another (Vidur,
fig. 1b).
"""

from collections.abc import Sequence
from dataclasses import replace

from cleave.api.role import Role
from cleave.planner.problem import Problem
from cleave.planner.search import goodput, ranking
from cleave.planner.search.batch_limits import choose_refined
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup, build_cell
from cleave.planner.search.candidates import Candidate, build_mixed
from cleave.planner.search.context import SearchContext
from cleave.planner.search.ranking import Choice, RankedPlacement

_COARSE_NUM_BATCHED_TOKENS = (512, 2048)


def optimize(
    search: SearchContext, candidates: Sequence[Candidate], choose: Choice = ranking.find_best
) -> RankedPlacement | None:
    """The mixed instance that `choose` prefers; None: none meets the targets."""
    return choose_refined(search, _list_coarse(search.problem, candidates), choose)


def compute_misconfiguration_cost(
    search: SearchContext, own: CandidatePlacement, foreign: CandidatePlacement
) -> float:
    """Resources per request of `foreign`, the best plan of another workload, relative to `own`. 1:
    as good as `own`; infinite: it never meets the targets."""
    rates = [
        goodput.find_goodput(search.trials, build_cell(search.problem, each), search.targets).rate
        / search.get_resources(each)
        for each in (own.with_copies(1), foreign.with_copies(1))
    ]
    return rates[0] / rates[1] if rates[1] else float("inf")


def _list_coarse(problem: Problem, candidates: Sequence[Candidate]) -> list[CandidatePlacement]:
    return [
        CandidatePlacement(
            (InstanceGroup(Role.MIXED, replace(instance, max_num_batched_tokens=tokens), 1),)
        )
        for candidate in candidates
        for batching in problem.policies.mixed
        for instance in (build_mixed(problem, candidate, batching),)
        for tokens in _COARSE_NUM_BATCHED_TOKENS
    ]
