"""Warnings where the choice of a plan is close: other requests may decide otherwise.

Called by `plan_search.plan` for the selected plan, whose attainment is that of one sample.
"""

from collections.abc import Iterator, Sequence

from cleave.api.deployment import Slo
from cleave.planner.problem import Problem
from cleave.planner.result.prediction import PredictedPlan
from cleave.planner.result.text import (
    format_interval,
    format_number,
    format_percent,
    format_plan,
    format_pools,
    format_resources,
)
from cleave.planner.search import goodput
from cleave.planner.search.candidate_placement import to_planned_pools
from cleave.planner.search.context import CloseCall

_RELATIVE_TOLERANCE = 1e-6


def has_margin(problem: Problem, selected: PredictedPlan) -> bool:
    """Whether the goodput, which is a mean over several samples, is at least the rate, as finely as
    goodput is searched for."""
    return selected.plan.prediction.goodput >= problem.rate * (1 - goodput.TOLERANCE)


def list_close_calls(
    problem: Problem, selected: PredictedPlan, close_calls: Sequence[CloseCall]
) -> Iterator[str]:
    """A warning if the selected plan serves the rate in one simulation and less with other
    requests, and one if a smaller placement misses the SLO by very little."""
    plan, objective, slo = selected.plan, problem.planning.objective, problem.slo
    if not has_margin(problem, selected):
        yield (
            f"no margin: over several samples of requests {format_plan(plan)} serves "
            f"{format_number(plan.prediction.goodput)} req/s ({format_interval(plan.prediction)}, "
            f"95 % confidence), below the {format_number(problem.rate)} req/s of the workload; "
            "plan for a higher rate to have some"
        )
    sized = [(each.placement.get_resources(objective), each) for each in close_calls]
    taken = selected.placement.get_resources(objective) * (1 - _RELATIVE_TOLERANCE)
    smaller = [(resources, each) for resources, each in sized if resources < taken]
    if smaller:
        resources, near = min(smaller, key=lambda pair: (pair[0], -pair[1].share))
        pools = format_pools(to_planned_pools(near.placement), is_gpu_chosen=plan.is_gpu_chosen)
        yield (
            f"close: {pools} with {format_resources(resources, objective)} {_describe(near, slo)}; "
            "other requests may decide otherwise"
        )


def _describe(near: CloseCall, slo: Slo) -> str:
    if slo.itl_p99_ms or slo.ttft_attainment or slo.tpot_attainment:
        return "misses the SLO by very little"
    return f"has {near.share:.2%} of requests in time instead of {format_percent(slo.attainment)}"
