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
from cleave.local.errors import UpError
from cleave.planner.deployment_checks import unknown_model
from cleave.planner.placement import Placement, plan
from cleave.planner.plan import Answer
from cleave.planner.result.text import reason_alone

if TYPE_CHECKING:
    from cleave.planner.problem import Problem

Tick = Callable[[int, int, str], None]


def place(
    deployment: LLMDeployment,
    folder: Path = Path(),
    cluster: Cluster | None = None,
    tick: Tick | None = None,
) -> Placement:
    """The placement of `deployment`; relative paths of traces refer to `folder`.

    Raises PlanError when the input is invalid, UpError when no plan meets the SLO, and
    MissingExtraError when planning is needed and the planner is not installed.
    """
    problem = _question(deployment, folder, cluster)
    if problem is None:
        return plan(deployment)
    # Compiled simulations are slow to load, and manual placements do not need them.
    from cleave.planner import plan_search

    return _chosen(plan_search.plan(problem, tick))


def _question(deployment: LLMDeployment, folder: Path, cluster: Cluster | None) -> "Problem | None":
    """The planning problem; None: nothing to plan, or the planner does not know the model."""
    spec = deployment.spec
    if spec.placement is not None or spec.workload is None:
        return None
    if spec.engine.type is not EngineType.EMULATED and cluster is None:
        return None
    is_unknown = unknown_model(deployment) is not None
    if is_unknown and spec.workload.trace is None:
        return None
    distribution.require("planner")
    from cleave.planner import problem_from_cluster, problem_from_profile

    if is_unknown:
        problem_from_cluster.demand(deployment, folder)
        return None
    if spec.engine.type is EngineType.EMULATED:
        return problem_from_profile.problem(deployment, folder, cluster=cluster)
    return problem_from_cluster.problem(deployment, cluster, folder) if cluster else None


def _chosen(answer: Answer) -> Placement:
    if answer.selected is not None:
        return Placement(answer.selected.pools, answer.reason, answer)
    reason = f"infeasible: {reason_alone(answer)}"
    raise UpError([f"{reason}; set spec.placement.manual to start it anyway"])
