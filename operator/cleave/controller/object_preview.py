"""The objects that the operator creates for a deployment, without a cluster. Pure.

Called by `cleave render`, and to judge pods before they exist. The objects come from the operator's
own builders; what only an API server knows is absent: owners, uids, and devices that nodes offer.
"""

from collections.abc import Iterator

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.controller.deployment.reconcile import build_owned_objects
from cleave.controller.pool.pods import build_leader, build_node_pods
from cleave.controller.settings import OperatorSettings
from cleave.controller.views import PoolView
from cleave.manifests.gateway import get_thresholds
from cleave.manifests.labels import Manifest, build_object
from cleave.manifests.pool import build_pools, build_selected_plan
from cleave.manifests.topology import NodeTopology
from cleave.planner.placement import Placement
from cleave.planner.resolved_deployment import resolve_in_cluster


def list_objects(
    deployment: LLMDeployment,
    placement: Placement,
    machines: NodeTopology,
    settings: OperatorSettings,
) -> Iterator[Manifest]:
    """Yield the objects of a deployment, then each pool and the pods of its first instance."""
    resolved = resolve_in_cluster(deployment)
    thresholds = get_thresholds(deployment, build_selected_plan(resolved, placement))
    yield from build_owned_objects(deployment, settings, thresholds)
    for pool in build_pools(resolved, placement, machines):
        spec = pool.spec.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        yield build_object(
            pool.api_version, pool.kind, pool.name, pool.namespace, pool.metadata.labels, spec=spec
        )
        yield from list_pods(pool, settings)


def list_pods(pool: InstancePool, settings: OperatorSettings) -> Iterator[Manifest]:
    """Yield the pods of a pool's first instance."""
    view = PoolView(pool, now_s=0.0, settings=settings)
    leader = build_leader(view, f"{pool.name}-0", 0 if pool.spec.colocation else None)
    yield leader
    if pool.spec.nodes > 1:
        yield from build_node_pods(view, leader)
