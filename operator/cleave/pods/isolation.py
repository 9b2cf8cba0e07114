"""Who may speak to workers: the pods of their own deployment, and the operator's namespace. Pure.

Called by the controller where it is told to. Engines ask nobody for a key: the gateway does, and
whoever reaches an engine past it is not asked. Ports of KV are chosen at each start, hence all.
The operator speaks to agents only; its pods are known by their namespace. What is hard: Kubernetes
lets the node itself in always, which probes and port-forwarding need.
"""

from cleave.pods.discovery import Owner, deployment_of
from cleave.pods.labels import (
    AGENT_PORT,
    COMPONENT,
    DEPLOYMENT,
    FOLLOWER,
    WORKER,
    Manifest,
    workers_name,
)

_NAMESPACE = "kubernetes.io/metadata.name"
"""Label that Kubernetes gives every namespace."""


def workers_policy(owner: Owner, operator_namespace: str) -> Manifest:
    """The NetworkPolicy over the workers of a deployment, followers included."""
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
