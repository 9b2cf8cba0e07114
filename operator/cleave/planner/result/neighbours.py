"""Plans with slightly more or fewer instances than given ones.

Called for the report, which shows the gain of another GPU.
"""

from collections.abc import Iterator, Sequence

from cleave.api.role import Role
from cleave.planner.plan import Plan
from cleave.planner.pool_simulation import to_candidate_placement
from cleave.planner.problem import Problem
from cleave.planner.result.prediction import predict
from cleave.planner.search import packing
from cleave.planner.search.candidate_placement import CandidatePlacement
from cleave.planner.search.context import SearchContext

_STEP_SHARE = 0.1


def list_neighbours(
    problem: Problem, plans: Sequence[Plan], excluded: Sequence[Plan]
) -> tuple[Plan, ...]:
    """Each of `plans` with more or fewer instances of one role, where the nodes have room.

    A step is a tenth of a role's instances, at least one. Plans of cells (Algorithm 2) get more or
    fewer complete cells. Plans in `excluded` are left out.
    """
    search = SearchContext.from_problem(problem)
    listed_pools = {plan.pools for plan in excluded}
    variants: list[Plan] = []
    for plan in plans:
        current = to_candidate_placement(problem, plan.pools, plan.algorithm, plan.cells)
        for placement in _list_variants(current):
            if not packing.has_room(problem, placement):
                continue
            other = predict(search, placement, plan.algorithm).plan
            if other.pools not in listed_pools:
                listed_pools.add(other.pools)
                variants.append(other)
    return tuple(variants)


def _list_variants(placement: CandidatePlacement) -> Iterator[CandidatePlacement]:
    if placement.is_in_node:
        step = _compute_step(placement.copies)
        if placement.copies > step:
            yield placement.with_copies(placement.copies - step)
        yield placement.with_copies(placement.copies + step)
        return
    for group in placement.groups:
        step = _compute_step(group.replicas)
        if group.replicas > step or (group.role is Role.MIXED and len(placement.groups) > 1):
            yield placement.change_replicas({group.role: -step})
        yield placement.change_replicas({group.role: step})


def _compute_step(count: int) -> int:
    return max(1, round(_STEP_SHARE * count))
