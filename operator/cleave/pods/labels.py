"""Names and labels that bind pools, pods and Services together."""

from typing import Any

from cleave.api.pool import InstancePool

Manifest = dict[str, Any]
"""A Kubernetes object as it is written in YAML."""

DEPLOYMENT = "cleave.dev/deployment"
POOL = "cleave.dev/pool"
ROLE = "cleave.dev/role"
COMPONENT = "cleave.dev/component"
REVISION = "cleave.dev/revision"
"""Instances of unlike revisions never work together."""
INSTANCE = "cleave.dev/instance"
"""Name of the instance that a pod is, or is a part of."""
CELL = "cleave.dev/cell"
"""Number of the cell whose instances share nodes (DistServe's Algorithm 2)."""
SEGMENT = "cleave.dev/segment"
"""What must lie in one node or NVLink domain: a cell, or the same stages of its instances."""

WORKER = "worker"
"""Component of the pods that have an agent: one per instance."""
FOLLOWER = "follower"
"""Component of the further pods of an instance that is spread over nodes."""
GATEWAY = "gateway"

AGENT_PORT = 9000
ENGINE_PORT = 9001
"""Of an instance's engine: the OpenAI API, and metrics."""
PICKER_PORT = 9002
"""Of gateways: the endpoint picker, at the port that the Inference Extension uses everywhere."""
GATEWAY_PORT = 8080
INTERNAL_PORT = 8081
"""Of gateways in a cluster: what they know of the fleet, without keys, and metrics."""


def pool_name(deployment: str, role: str) -> str:
    """Name of the pool of a role."""
    return f"{deployment}-{role}"


def workers_name(deployment: str) -> str:
    """Name of the headless Service over all workers."""
    return f"{deployment}-workers"


def gateway_name(deployment: str) -> str:
    """Name of the gateway's Deployment and of its disruption budget."""
    return f"{deployment}-gateway"


def account_name(deployment: str) -> str:
    """Name of the service account of a deployment's pods, and of what binds its role."""
    return f"{deployment}-discovery"


def worker_labels(pool: InstancePool, instance: str, component: str = WORKER) -> dict[str, str]:
    """Labels of an instance's pods."""
    return {
        DEPLOYMENT: pool.spec.deployment,
        POOL: pool.name,
        ROLE: str(pool.spec.role),
        COMPONENT: component,
        REVISION: pool.spec.revision,
        INSTANCE: instance,
    }


def component_labels(deployment: str, component: str) -> dict[str, str]:
    """Labels of a whole component; also its selector."""
    return {DEPLOYMENT: deployment, COMPONENT: component}


def agents_source(deployment: str, namespace: str) -> str:
    """Where a deployment's agents are found (`cleave.rpc.discovery`)."""
    return f"endpoints:{namespace}/{workers_name(deployment)}:{AGENT_PORT}"
