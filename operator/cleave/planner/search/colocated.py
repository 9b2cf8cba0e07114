"""The best plan of mixed instances: the baseline that disaggregation has to beat.

Vidur's search (sections 6 and 7.3): parallelism, batching policy, batch size and tokens per step,
coarse to fine.
"""

from collections.abc import Sequence

from cleave.api.role import Role
from cleave.planner.problem import Problem
from cleave.planner.search.batch_limits import choose_refined
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup
from cleave.planner.search.candidates import Candidate, build_mixed
from cleave.planner.search.context import SearchContext
from cleave.planner.search.ranking import RankedPlacement

_COARSE_NUM_BATCHED_TOKENS = (512, 2048)


def optimize(search: SearchContext, candidates: Sequence[Candidate]) -> RankedPlacement | None:
    """The mixed instance with most goodput per resource; None: none meets the targets."""
    return choose_refined(search, list_instances(search.problem, candidates))


def list_instances(problem: Problem, candidates: Sequence[Candidate]) -> list[CandidatePlacement]:
    """A mixed instance of every candidate and batching, with few and many tokens per step."""
    instances = (
        build_mixed(problem, candidate, batching).with_limits(batched_tokens=tokens)
        for candidate in candidates
        for batching in problem.policies.mixed
        for tokens in _COARSE_NUM_BATCHED_TOKENS
    )
    groups = (InstanceGroup(Role.MIXED, instance, 1) for instance in dict.fromkeys(instances))
    return [CandidatePlacement((group,)) for group in groups]
