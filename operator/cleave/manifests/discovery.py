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
    account_name,
    component_labels,
    workers_name,
)

Owner = LLMDeployment | InstancePool


def workers_service(owner: Owner) -> Manifest:
    """The headless Service over all workers of a deployment, including those not ready."""
    deployment = deployment_of(owner)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": workers_name(deployment),
            "namespace": owner.namespace,
            "labels": component_labels(deployment, WORKER),
        },
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            # Workers discover peers, and are asked for their health, before they are ready.
            "publishNotReadyAddresses": True,
            "selector": component_labels(deployment, WORKER),
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


def service_account(owner: Owner) -> Manifest:
    """The service account of a deployment's pods."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": _metadata(owner),
        "automountServiceAccountToken": False,
    }


def role_binding(owner: Owner, cluster_role: str) -> Manifest:
    """Bind that account to `cluster_role`, which allows to read EndpointSlices."""
    name = account_name(deployment_of(owner))
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": _metadata(owner),
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": cluster_role,
        },
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": owner.namespace}],
    }


def deployment_of(owner: Owner) -> str:
    """Name of the deployment of this owner."""
    return owner.spec.deployment if isinstance(owner, InstancePool) else owner.name


def _metadata(owner: Owner) -> Manifest:
    deployment = deployment_of(owner)
    return {
        "name": account_name(deployment),
        "namespace": owner.namespace,
        "labels": {DEPLOYMENT: deployment},
    }
