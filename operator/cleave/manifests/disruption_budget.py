"""PodDisruptionBudgets: how many pods a node drain may evict at a time. Pure.

Called by the controller. Kubernetes counts pods, and an instance that spans nodes has several. A
budget always allows to evict the last instance, as its node could not be drained otherwise. A
pool's budget sets minAvailable, not maxUnavailable: for that Kubernetes would read the pool's scale
subresource, which it cannot find in the first seconds after the CRDs were created, and it does not
retry.
"""

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.manifests.labels import (
    DEPLOYMENT,
    GATEWAY,
    POOL,
    Manifest,
    build_component_labels,
    get_gateway_name,
)


def build_pool_budget(pool: InstancePool) -> Manifest:
    """The budget of a pool: one instance at a time."""
    spec = pool.spec
    allowed: Manifest = {"minAvailable": max(0, spec.replicas - 1) * spec.nodes}
    labels = {DEPLOYMENT: spec.deployment, POOL: pool.name}
    return _build_budget(pool.name, pool.namespace, labels, allowed)


def build_gateway_budget(deployment: LLMDeployment) -> Manifest:
    """The budget of the gateway: one pod at a time."""
    labels = build_component_labels(deployment.name, GATEWAY)
    name = get_gateway_name(deployment.name)
    return _build_budget(name, deployment.namespace, labels, {"maxUnavailable": 1})


def _build_budget(name: str, namespace: str, labels: dict[str, str], allowed: Manifest) -> Manifest:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "namespace": namespace, "labels": labels},
        "spec": {
            **allowed,
            "selector": {"matchLabels": labels},
            # A pod that is not ready serves no requests; it must not block the node's drain.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
