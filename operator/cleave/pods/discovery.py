"""What makes a deployment's agents findable: a headless Service, and the right to read it. Pure.

Called by the controller, for a deployment or for a pool that was made by hand. Gateways and agents
watch the Service's EndpointSlices with a service account that may do nothing else.
"""

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.pods.labels import (
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
    """The headless Service over all workers of a deployment, also those that are not ready."""
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
            # A worker looks for peers, and is asked how it is, before it is ready.
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
    """Lets that account read the EndpointSlices of its namespace, which `cluster_role` grants."""
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
    """Name of the deployment whose agents are meant."""
    return owner.spec.deployment if isinstance(owner, InstancePool) else owner.name


def _metadata(owner: Owner) -> Manifest:
    deployment = deployment_of(owner)
    return {
        "name": account_name(deployment),
        "namespace": owner.namespace,
        "labels": {DEPLOYMENT: deployment},
    }
