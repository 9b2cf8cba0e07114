"""Collects what the page shows of the deployment and its problem. Pure."""

from cleave.api.deployment import LLMDeployment
from cleave.planner.pool_simulation import PlacementSimulator
from cleave.planner.problem import Problem
from cleave.planner.result.text import format_number
from cleave.report.layout import NodeShape
from cleave.report.load_study import ReportInput

_MIN_REQUESTS = 1000
_MAX_REQUESTS = 20_000
_DURATION_S = 120.0
"""Simulated time of one point on the page, within the limits on the number of requests."""


def build_report_input(deployment: LLMDeployment, problem: Problem) -> ReportInput:
    """Describe the deployment and the problem built from it."""
    return ReportInput(
        deployment=deployment.name,
        model=deployment.spec.model.name,
        slo=problem.slo,
        rate=problem.rate,
        traffic=_describe_traffic(deployment, problem),
        nodes=tuple(
            NodeShape(supply.gpu, supply.num_nodes, supply.gpus_per_node)
            for supply in problem.supplies
        ),
        max_gpus=problem.max_gpus,
        seed=problem.seed,
    )


def build_simulator(problem: Problem) -> PlacementSimulator:
    """A simulator of the problem's requests, with as many requests as a point of the page needs."""
    num_requests = int(problem.rate * _DURATION_S)
    return PlacementSimulator(problem, min(max(num_requests, _MIN_REQUESTS), _MAX_REQUESTS))


def _describe_traffic(deployment: LLMDeployment, problem: Problem) -> str:
    demand, spec = problem.demand, deployment.spec.workload
    lengths = (
        f"prompts of {format_number(demand.mean_prompt_tokens)} and outputs of "
        f"{format_number(demand.mean_output_tokens)} tokens on average"
    )
    if spec is not None and spec.trace is not None:
        return f"{lengths}, from {spec.trace.path}"
    burstiness = spec.gap_variation if spec is not None else 1.0
    if burstiness == 1.0:
        return f"{lengths}, Poisson arrivals"
    return f"{lengths}, gaps between arrivals with a variation of {burstiness:g}"
