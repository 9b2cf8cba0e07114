"""Pools, placements and revisions of a deployment in a cluster, from its spec."""

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.manifests import pool
from cleave.manifests.topology import NodeTopology
from cleave.planner import placement
from cleave.planner.placement import Placement
from cleave.planner.resolved_deployment import resolve_in_cluster


def build_pools(deployment: LLMDeployment, *machines: NodeTopology) -> list[InstancePool]:
    """The pools of the placement by hand, or of the smallest one."""
    resolved = resolve_in_cluster(deployment)
    return pool.build_pools(resolved, placement.choose_placement(resolved), *machines)


def choose_placement(deployment: LLMDeployment) -> Placement:
    """The placement by hand, or the smallest one."""
    return placement.choose_placement(resolve_in_cluster(deployment))


def hash_revision(deployment: LLMDeployment) -> str:
    """The hash of what instances must share."""
    return pool.hash_revision(resolve_in_cluster(deployment))
