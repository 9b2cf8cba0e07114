"""NetworkPolicy for workers: admits their deployment's pods and the operator's namespace. Pure.

Called by the controller where `--isolate-workers` is set. Engines check no API key: the gateway
does, and a client that reaches an engine directly would bypass it. KV ports are chosen at each
start, hence all ports. The operator connects to agents only, and is identified by its namespace.
What is hard: Kubernetes always admits the node itself, which probes and port-forwarding need.
"""

from cleave.manifests.discovery import Owner, deployment_of
from cleave.manifests.labels import (
    AGENT_PORT,
    COMPONENT,
    DEPLOYMENT,
    FOLLOWER,
    WORKER,
    Manifest,
    workers_name,
)

_NAMESPACE = "kubernetes.io/metadata.name"
"""Label that Kubernetes sets on every namespace."""


def workers_policy(owner: Owner, operator_namespace: str) -> Manifest:
    """The NetworkPolicy for all workers of a deployment."""
    deployment = deployment_of(owner)
    operator = {
        "from": [{"namespaceSelector": {"matchLabels": {_NAMESPACE: operator_namespace}}}],
        "ports": [{"protocol": "TCP", "port": AGENT_PORT}],
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": workers_name(deployment),
            "namespace": owner.namespace,
            "labels": {DEPLOYMENT: deployment},
        },
        "spec": {
            "podSelector": {
                "matchLabels": {DEPLOYMENT: deployment},
                "matchExpressions": [
                    {"key": COMPONENT, "operator": "In", "values": [WORKER, FOLLOWER]}
                ],
            },
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": {DEPLOYMENT: deployment}}}]},
                operator,
            ],
        },
    }
