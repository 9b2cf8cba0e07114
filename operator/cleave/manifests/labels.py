"""Names and labels that connect pools, pods and Services, and the frame of every manifest."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cleave.api.pool import InstancePool

Manifest = dict[str, Any]
"""A Kubernetes object as decoded from YAML."""

GPU = "nvidia.com/gpu"
"""Resource of pods and nodes."""

DEPLOYMENT = "cleave.dev/deployment"
POOL = "cleave.dev/pool"
ROLE = "cleave.dev/role"
COMPONENT = "cleave.dev/component"
REVISION = "cleave.dev/revision"
"""Instances of different revisions never work together. That of the spec; the operator adds a dot
and the weights to that of a pod whose engine has not loaded the newest ones."""
WEIGHTS = "cleave.dev/weights"
"""Digest of what a pod's engine has loaded, as the operator has seen it last; of a pod whose
engines differ the oldest and the newest, with a dot between."""
WEIGHTS_READ_MS = "cleave.dev/weights-read-ms"
"""Annotation: when that was read, by the clock of its node, in ms since 1970."""
INSTANCE = "cleave.dev/instance"
"""Name of the instance that a pod is or is a part of."""
NODE_RANK = "cleave.dev/node-rank"
"""Of further pods with data-parallel ranks of an instance: which pod it is, from 1."""
CELL = "cleave.dev/cell"
"""Number of the cell: a co-location group, whose instances share nodes (DistServe's Algorithm
2)."""
SEGMENT = "cleave.dev/segment"
"""Pods that must share a node or NVLink domain: a cell, or the same stages of its instances."""

WORKER = "worker"
"""Component of the pods with agents."""
NODE_WORKER = "follower"
"""Component of the further pods of an engine that spans several nodes, which have no agent."""
GATEWAY = "gateway"

AGENT_PORT = 9000
ENGINE_PORT = 9001
"""Port of an instance's engine: OpenAI API and metrics."""
CELL_HEALTH_PORT = 8999
"""Port of the launcher of a pod with several engines, for probes and for the agents of
data-parallel ranks; the agents have 9000, 9002, ..., their engines the ports between them."""
PICKER_PORT = 9002
"""Port of a gateway's endpoint picker, the usual one of the Inference Extension."""
ROUTER_PORT = 9003
"""Port of a gateway's Router service."""
GATEWAY_PORT = 8080
INTERNAL_PORT = 8081
"""Port of a gateway for the operator: state of the fleet without API keys, and metrics."""


def get_agent_port(number: int) -> int:
    """Port of an agent, by its number in its pod."""
    return AGENT_PORT + 2 * number


def get_agent_port_name(number: int) -> str:
    """Name of the port of an agent, by its number in its pod."""
    return f"agent-{number}" if number else "agent"


def get_pool_name(deployment: str, role: str) -> str:
    """Name of the pool of a role."""
    return f"{deployment}-{role}"


def get_workers_name(deployment: str) -> str:
    """Name of the headless Service over all workers."""
    return f"{deployment}-workers"


def get_gateway_name(deployment: str) -> str:
    """Name of the gateway's Deployment and of its disruption budget."""
    return f"{deployment}-gateway"


def build_worker_labels(
    pool: "InstancePool", instance: str, component: str = WORKER
) -> dict[str, str]:
    """Labels of an instance's pods, the template's included, which may replace the usual ones."""
    return {
        **_build_usual_labels(pool.spec.deployment, component),
        **pool.spec.template.labels,
        DEPLOYMENT: pool.spec.deployment,
        POOL: pool.name,
        ROLE: str(pool.spec.role),
        COMPONENT: component,
        REVISION: pool.spec.revision,
        INSTANCE: instance,
    }


def build_gateway_labels(deployment: str) -> dict[str, str]:
    """Labels of a gateway's pods."""
    usual = _build_usual_labels(deployment, GATEWAY)
    return usual | build_component_labels(deployment, GATEWAY)


def _build_usual_labels(deployment: str, component: str) -> dict[str, str]:
    """Kubernetes' recommended labels, by which other tools group pods. They select nothing here."""
    return {
        "app.kubernetes.io/name": "cleave",
        "app.kubernetes.io/instance": deployment,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "cleave",
        "app.kubernetes.io/managed-by": "cleave-operator",
    }


def build_component_labels(deployment: str, component: str) -> dict[str, str]:
    """Labels of all pods of a component; also its selector."""
    return {DEPLOYMENT: deployment, COMPONENT: component}


def build_object(
    version: str, kind: str, name: str, namespace: str, labels: Mapping[str, str], **fields: object
) -> Manifest:
    """Object of the API server; `fields`: everything but its metadata, such as `spec`."""
    metadata = {"name": name, "namespace": namespace, "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}


def get_agents_source(deployment: str, namespace: str) -> str:
    """Where to discover a deployment's agents, as `cleave.rpc.agent_discovery` reads it."""
    return f"endpoints:{namespace}/{get_workers_name(deployment)}:{AGENT_PORT}"
