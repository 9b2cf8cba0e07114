"""Services: where agents are found, and where clients connect. Pure; for clusters only."""

from cleave.api.deployment import LLMDeployment
from cleave.pods.labels import (
    AGENT_PORT,
    GATEWAY,
    WORKER,
    Manifest,
    component_labels,
    workers_name,
)


def workers_service(deployment: LLMDeployment) -> Manifest:
    """Headless Service over all workers, ready or not: its DNS name is how agents are found."""
    return _service(
        deployment,
        workers_name(deployment.name),
        WORKER,
        {
            "clusterIP": "None",
            # Workers test the KV path with each other before any of them is ready.
            "publishNotReadyAddresses": True,
            "ports": [{"name": "agent", "port": AGENT_PORT, "targetPort": "agent"}],
        },
    )


def gateway_service(deployment: LLMDeployment) -> Manifest:
    """The Service that OpenAI clients use: http://NAME.NAMESPACE.svc/v1."""
    return _service(
        deployment,
        deployment.name,
        GATEWAY,
        {"ports": [{"name": "http", "port": 80, "targetPort": "http"}]},
    )


def _service(
    deployment: LLMDeployment, name: str, component: str, spec: dict[str, object]
) -> Manifest:
    labels = component_labels(deployment.name, component)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": deployment.namespace, "labels": labels},
        "spec": {"selector": dict(labels), **spec},
    }
