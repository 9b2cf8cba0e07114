"""NetworkPolicy for workers: admits their deployment's pods and the operator's namespace. Pure.

Called by the controller where `--isolate-workers` is set. Engines check no API key: the gateway
does, and a client that reaches an engine directly would bypass it. KV ports are chosen at each
start, hence all ports. The operator connects to agents only, and is identified by its namespace.
Kubernetes always admits the node itself, which probes and port-forwarding need.
"""

from cleave.manifests.discovery import DeploymentOrPool, get_deployment_name
from cleave.manifests.labels import (
    AGENT_PORT,
    COMPONENT,
    DEPLOYMENT,
    NODE_WORKER,
    WORKER,
    Manifest,
    get_workers_name,
)

_NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""Label that Kubernetes sets on every namespace."""


def build_workers_policy(owner: DeploymentOrPool, operator_namespace: str) -> Manifest:
    """The NetworkPolicy for all workers of a deployment."""
    deployment = get_deployment_name(owner)
    operator = {
        "from": [{"namespaceSelector": {"matchLabels": {_NAMESPACE_LABEL: operator_namespace}}}],
        "ports": [{"protocol": "TCP", "port": AGENT_PORT}],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": get_workers_name(deployment),
            "namespace": owner.namespace,
            "labels": {DEPLOYMENT: deployment},
        },
        "spec": {
            "podSelector": {
                "matchLabels": {DEPLOYMENT: deployment},
                "matchExpressions": [
                    {"key": COMPONENT, "operator": "In", "values": [WORKER, NODE_WORKER]}
                ],
            },
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": {DEPLOYMENT: deployment}}}]},
                operator,
            ],
        },
    }
