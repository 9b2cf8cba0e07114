"""Objects for the discovery of a deployment's agents: Service, service account, permission. Pure.

Called by the controller, for a deployment or a manually created pool. Gateways and agents watch the
Service's EndpointSlices with a service account that has no other permission.
"""

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.manifests.labels import (
    AGENT_PORT,
    DEPLOYMENT,
    WORKER,
    Manifest,
    build_component_labels,
    get_account_name,
    get_workers_name,
)

DeploymentOrPool = LLMDeployment | InstancePool


def build_workers_service(owner: DeploymentOrPool) -> Manifest:
    """The headless Service over all workers of a deployment, including those not ready."""
    deployment = get_deployment_name(owner)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": get_workers_name(deployment),
            "namespace": owner.namespace,
            "labels": build_component_labels(deployment, WORKER),
        },
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            # Workers discover peers, and are probed, before they are ready.
            "publishNotReadyAddresses": True,
            "selector": build_component_labels(deployment, WORKER),
            "ports": [
                {
                    "name": "agent",
                    "port": AGENT_PORT,
                    "targetPort": "agent",
                    "protocol": "TCP",
                    "appProtocol": "grpc",
                }
            ],
        },
    }


def build_service_account(owner: DeploymentOrPool) -> Manifest:
    """The service account of a deployment's pods."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": _build_metadata(owner),
        "automountServiceAccountToken": False,
    }


def build_role_binding(owner: DeploymentOrPool, cluster_role: str) -> Manifest:
    """Bind that account to `cluster_role`, which allows to read EndpointSlices."""
    name = get_account_name(get_deployment_name(owner))
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": _build_metadata(owner),
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": cluster_role,
        },
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": owner.namespace}],
    }


def get_deployment_name(owner: DeploymentOrPool) -> str:
    """Name of the deployment of this owner."""
    return owner.spec.deployment if isinstance(owner, InstancePool) else owner.name


def _build_metadata(owner: DeploymentOrPool) -> Manifest:
    deployment = get_deployment_name(owner)
    return {
        "name": get_account_name(deployment),
        "namespace": owner.namespace,
        "labels": {DEPLOYMENT: deployment},
    }
