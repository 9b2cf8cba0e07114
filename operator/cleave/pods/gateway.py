"""The gateway's pod. Pure; called by `cleave.local`."""

from cleave.api.deployment import LLMDeployment
from cleave.pods.container import addresses, container_security, image, pod_security, scratch
from cleave.pods.labels import (
    GATEWAY,
    GATEWAY_PORT,
    Manifest,
    agents_source,
    component_labels,
)

GRACE_S = 45
"""Running streams have 30 s to end after SIGTERM."""


def gateway_pod(
    deployment: LLMDeployment, *, host: str = "$(POD_IP)", port: int = GATEWAY_PORT
) -> Manifest:
    """Pod of a deployment's gateway, listening on host:port."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{deployment.name}-gateway",
            "namespace": deployment.namespace,
            "labels": component_labels(deployment.name, GATEWAY),
        },
        "spec": {
            "restartPolicy": "Always",
            "terminationGracePeriodSeconds": GRACE_S,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": pod_security(),
            "containers": [_container(deployment, host, port)],
            "volumes": [scratch("tmp", "/tmp")[0]],  # noqa: S108 - inside the container
        },
    }


def _container(deployment: LLMDeployment, host: str, port: int) -> Manifest:
    routing = deployment.spec.routing
    return {
        "name": "gateway",
        "image": image("gateway"),
        "command": [
            *("python", "-m", "cleave.gateway.main"),
            *("--host", host, "--port", str(port)),
            *("--agents", "$(CLEAVE_AGENTS)"),
            *("--fallback", str(routing.fallback)),
            *("--queue-limit", str(routing.queue_limit)),
        ],
        "env": addresses(agents_source(deployment.name, deployment.namespace)),
        "ports": [{"name": "http", "containerPort": port}],
        # The gateway is one event loop: more than a core is never used.
        "resources": {
            "requests": {"cpu": "500m", "memory": "128Mi"},
            "limits": {"memory": "1Gi"},
        },
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": port},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
        },
        "securityContext": container_security(),
        "volumeMounts": [scratch("tmp", "/tmp")[1]],  # noqa: S108
    }
