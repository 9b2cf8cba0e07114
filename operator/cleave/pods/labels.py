"""Names and labels that bind pools, pods and Services together."""

from typing import Any

from cleave.api.role import Role

Manifest = dict[str, Any]
"""A Kubernetes object as it is written in YAML."""

DEPLOYMENT = "cleave.dev/deployment"
POOL = "cleave.dev/pool"
ROLE = "cleave.dev/role"
COMPONENT = "cleave.dev/component"

WORKER = "worker"
GATEWAY = "gateway"

AGENT_PORT = 9000
GATEWAY_PORT = 8080


def pool_name(deployment: str, role: Role) -> str:
    """Name of the pool of a role."""
    return f"{deployment}-{role}"


def workers_name(deployment: str) -> str:
    """Name of the headless Service over all workers."""
    return f"{deployment}-workers"


def worker_labels(deployment: str, pool: str, role: Role) -> dict[str, str]:
    """Labels of a worker pod."""
    return {DEPLOYMENT: deployment, POOL: pool, ROLE: str(role), COMPONENT: WORKER}


def component_labels(deployment: str, component: str) -> dict[str, str]:
    """Labels of a whole component; also its selector."""
    return {DEPLOYMENT: deployment, COMPONENT: component}


def agents_source(deployment: str, namespace: str) -> str:
    """Where a deployment's agents are found (`cleave.rpc.discovery`)."""
    return f"dns:{workers_name(deployment)}.{namespace}.svc:{AGENT_PORT}"
