"""Decides the instances of each role: from spec.placement, planned, or the smallest pair.

Called by `cleave up`. A deployment with a workload is planned: emulated engines from their latency
profile, real engines for the machines of a cluster file.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from cleave import distribution
from cleave.api.cluster import Cluster
from cleave.api.deployment import LLMDeployment
from cleave.api.engine import EngineType
from cleave.local.errors import DeploymentStartError
from cleave.planner.deployment_checks import explain_unknown_model
from cleave.planner.placement import Placement, choose_placement
from cleave.planner.plan import PlanningResult
from cleave.planner.result.text import strip_verdict

if TYPE_CHECKING:
    from cleave.planner.problem import Problem

ProgressCallback = Callable[[int, int, str], None]


def decide_placement(
    deployment: LLMDeployment,
    folder: Path = Path(),
    cluster: Cluster | None = None,
    tick: ProgressCallback | None = None,
) -> Placement:
    """The placement of `deployment`; relative paths of traces refer to `folder`.

    Raises PlanError when the input is invalid, DeploymentStartError when no plan meets the SLO, and
    MissingExtraError when planning is needed and the planner is not installed.
    """
    problem = _build_problem(deployment, folder, cluster)
    if problem is None:
        return choose_placement(deployment)
    # Compiled simulations are slow to load, and manual placements do not need them.
    from cleave.planner import plan_search

    return _get_placement(plan_search.plan(problem, tick))


def _build_problem(
    deployment: LLMDeployment, folder: Path, cluster: Cluster | None
) -> "Problem | None":
    """The planning problem; None: nothing to plan, or the planner does not know the model."""
    spec = deployment.spec
    if spec.placement is not None or spec.workload is None:
        return None
    if spec.engine.type is not EngineType.EMULATED and cluster is None:
        return None
    is_unknown = explain_unknown_model(deployment) is not None
    if is_unknown and spec.workload.trace is None:
        return None
    distribution.require("planner")
    from cleave.planner import problem_from_cluster, problem_from_profile

    if is_unknown:
        problem_from_cluster.build_demand(deployment, folder)
        return None
    if spec.engine.type is EngineType.EMULATED:
        return problem_from_profile.build_problem(deployment, folder, cluster=cluster)
    return problem_from_cluster.build_problem(deployment, cluster, folder) if cluster else None


def _get_placement(result: PlanningResult) -> Placement:
    if result.selected is not None:
        return Placement(result.selected.pools, result.reason, result)
    reason = f"infeasible: {strip_verdict(result)}"
    raise DeploymentStartError([f"{reason}; set spec.placement.manual to start it anyway"])
