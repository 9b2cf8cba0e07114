"""Plans beside those of an answer: what an instance more or less would do, of many a tenth.

Called for the report, which shows what another GPU buys.
"""

from collections.abc import Iterator, Sequence

from cleave.api.role import Role
from cleave.planner import packing
from cleave.planner.bench import to_draft
from cleave.planner.draft import Draft
from cleave.planner.plan import Plan
from cleave.planner.predict import predict
from cleave.planner.problem import Problem
from cleave.planner.trials import Targets, Trials

_SHARE = 0.1


def neighbours(problem: Problem, plans: Sequence[Plan], known: Sequence[Plan]) -> tuple[Plan, ...]:
    """Each of `plans` with more or fewer instances of one role, where the nodes have room.

    A step is a tenth of a role's instances, at least one. Where instances stay together
    (Algorithm 2) whole cells are added or taken away. Those of `known` are left out.
    """
    targets = Targets.of(problem.slo)
    trials = Trials(problem.demand, problem.seed)
    seen = {plan.pools for plan in known}
    found: list[Plan] = []
    for plan in plans:
        for draft in _beside(to_draft(problem, plan.pools, plan.algorithm)):
            if not packing.fits(problem, draft):
                continue
            other = predict(problem, trials, draft, targets, plan.algorithm).plan
            if other.pools not in seen:
                seen.add(other.pools)
                found.append(other)
    return tuple(found)


def _beside(draft: Draft) -> Iterator[Draft]:
    if draft.is_in_node:
        step = _step(draft.copies)
        if draft.copies > step:
            yield draft.copied(draft.copies - step)
        yield draft.copied(draft.copies + step)
        return
    for group in draft.groups:
        step = _step(group.replicas)
        if group.replicas > step or (group.role is Role.MIXED and len(draft.groups) > 1):
            yield draft.changed({group.role: -step})
        yield draft.changed({group.role: step})


def _step(count: int) -> int:
    return max(1, round(_SHARE * count))
