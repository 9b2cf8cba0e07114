"""The gateway: a pod on one machine, or a Deployment with its Service in a cluster. Pure.

Called by `cleave.local` and the controller.
"""

from cleave.api.deployment import GatewaySpec, LLMDeployment, PoolsSpec
from cleave.api.engine import TransferMode
from cleave.api.plan import SelectedPlan
from cleave.manifests import topology
from cleave.manifests.container import (
    LISTEN_ON,
    build_address_env,
    build_container_security,
    build_pod_defaults,
    build_scratch_volume,
    get_image,
)
from cleave.manifests.labels import (
    GATEWAY,
    GATEWAY_PORT,
    INTERNAL_PORT,
    PICKER_PORT,
    Manifest,
    build_component_labels,
    get_agents_source,
    get_gateway_name,
)

SHUTDOWN_DELAY_S = 5
"""After SIGTERM gateways accept requests for this many seconds, until all nodes route elsewhere."""
GRACE_SLACK_S = SHUTDOWN_DELAY_S + 10
"""Seconds between the end of the drain and SIGKILL."""

_INTERNAL = "internal"
_PICKER = "picker"
_FILES = "/etc/cleave"
_KEYS, _TLS, _LENGTHS, _PICKER_TLS = "keys", "tls", "lengths", "picker-tls"
"""Volumes, each mounted below _FILES by its name."""


def build_gateway_pod(
    deployment: LLMDeployment,
    *,
    host: str = LISTEN_ON,
    port: int = GATEWAY_PORT,
    internal_port: int = INTERNAL_PORT,
    plan: SelectedPlan | None = None,
) -> Manifest:
    """Pod of a deployment's gateway that listens on host:port; `plan`: the current one."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": get_gateway_name(deployment.name),
            "namespace": deployment.namespace,
            "labels": build_component_labels(deployment.name, GATEWAY),
        },
        "spec": _build_pod_spec(
            deployment, _build_container(deployment, host, port, internal_port, plan)
        ),
    }


def build_gateway_deployment(deployment: LLMDeployment, *, image_prefix: str = "") -> Manifest:
    """The gateway in a cluster: identical pods, on different nodes where possible."""
    labels = build_component_labels(deployment.name, GATEWAY)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {
            "name": get_gateway_name(deployment.name),
            "namespace": deployment.namespace,
            "labels": labels,
        },
        "spec": {
            "replicas": deployment.spec.gateway.replicas,
            "selector": {"matchLabels": labels},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
            },
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    **_build_pod_spec(
                        deployment, _build_cluster_container(deployment, image_prefix)
                    ),
                    "topologySpreadConstraints": topology.build_topology_spread(labels),
                },
            },
        },
    }


def build_gateway_service(deployment: LLMDeployment) -> Manifest:
    """The Service for clients: the deployment's name, port 80, or 443 with a certificate."""
    labels = build_component_labels(deployment.name, GATEWAY)
    scheme, port = _get_scheme(deployment), 443 if deployment.spec.gateway.tls_secret else 80
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": deployment.name,
            "namespace": deployment.namespace,
            "labels": labels,
        },
        "spec": {
            "type": "ClusterIP",
            "selector": labels,
            "ports": [
                {"name": scheme, "port": port, "targetPort": scheme, "protocol": "TCP"},
                *_build_picker_service_ports(deployment.spec.gateway),
            ],
        },
    }


def build_url(deployment: LLMDeployment) -> str:
    """Base URL for OpenAI clients inside the cluster."""
    return f"{_get_scheme(deployment)}://{deployment.name}.{deployment.namespace}.svc/v1"


def _get_scheme(deployment: LLMDeployment) -> str:
    """URL scheme for clients, which is also the name of the port."""
    return "https" if deployment.spec.gateway.tls_secret else "http"


def _build_pod_spec(deployment: LLMDeployment, container: Manifest) -> Manifest:
    return {
        **build_pod_defaults(deployment.name),
        "terminationGracePeriodSeconds": deployment.spec.template.drain_timeout_s + GRACE_SLACK_S,
        "containers": [container],
        "volumes": [build_scratch_volume("tmp", "/tmp")[0], *_build_volumes(deployment)],  # noqa: S108 - inside it
    }


def _build_volumes(deployment: LLMDeployment) -> list[Manifest]:
    """Volumes with the files that the deployment refers to."""
    gateway, routing = deployment.spec.gateway, deployment.spec.routing
    secrets = {
        _KEYS: gateway.keys_secret,
        _TLS: gateway.tls_secret,
        _PICKER_TLS: gateway.endpoint_picker_tls_secret if gateway.endpoint_picker else None,
    }
    volumes: list[Manifest] = [
        {"name": name, "secret": {"secretName": secret, "optional": False}}
        for name, secret in secrets.items()
        if secret
    ]
    if name := routing.lengths_config_map:
        volumes.append({"name": _LENGTHS, "configMap": {"name": name, "optional": False}})
    return volumes


def _build_picker_service_ports(gateway: GatewaySpec) -> list[Manifest]:
    if not gateway.endpoint_picker:
        return []
    app_protocol = "kubernetes.io/h2c" if gateway.endpoint_picker_plain else "http2"
    port = {
        "port": PICKER_PORT,
        "targetPort": _PICKER,
        "protocol": "TCP",
        "appProtocol": app_protocol,
    }
    return [{"name": _PICKER, **port}]


def _build_cluster_container(deployment: LLMDeployment, image_prefix: str) -> Manifest:
    """The container in a cluster: with a shutdown delay and a liveness probe."""
    plan = deployment.status.plan if deployment.status else None
    container = _build_container(
        deployment, LISTEN_ON, GATEWAY_PORT, INTERNAL_PORT, plan, image_prefix
    )
    flags = ["--leave-delay", str(SHUTDOWN_DELAY_S)]
    if deployment.spec.scaling.idle_s is not None:
        flags += ["--wake-timeout", str(deployment.spec.scaling.wake_timeout_s)]
    ports = list(container["ports"])
    if deployment.spec.gateway.endpoint_picker:
        flags += ["--endpoint-picker-port", str(PICKER_PORT)]
        flags += _build_picker_tls_flags(deployment.spec.gateway)
        ports.append({"name": _PICKER, "containerPort": PICKER_PORT})
    return {
        **container,
        "command": [*container["command"], *flags],
        "ports": ports,
        # /health depends on workers; /livez responds in time under any load.
        "livenessProbe": {
            "httpGet": {"path": "/livez", "port": INTERNAL_PORT},
            "initialDelaySeconds": 30,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
    }


def _build_container(
    deployment: LLMDeployment,
    host: str,
    port: int,
    internal_port: int,
    plan: SelectedPlan | None,
    image_prefix: str = "",
) -> Manifest:
    """The container without what only a cluster needs.

    `internal_port` serves the operator, without API keys.
    """
    gateway, routing, slo = deployment.spec.gateway, deployment.spec.routing, deployment.spec.slo
    short_prompt_tokens = plan.whole_below_tokens if plan else None
    is_auto = deployment.spec.engine.transfer is TransferMode.AUTO
    overlap_min_tokens = plan.ahead_from_tokens if plan and is_auto else None
    mounts = [
        {"name": each["name"], "mountPath": f"{_FILES}/{each['name']}", "readOnly": True}
        for each in _build_volumes(deployment)
    ]
    lengths = f"{_FILES}/{_LENGTHS}/lengths.json"
    return {
        "name": "gateway",
        "image": gateway.image or get_image("gateway", image_prefix),
        "command": [
            *("python", "-m", "cleave.gateway.main"),
            *("--host", host, "--port", str(port), "--internal-port", str(internal_port)),
            *("--agents", "$(CLEAVE_AGENTS)"),
            *(("--processes", str(gateway.processes)) if gateway.processes > 1 else ()),
            *("--fallback", str(routing.fallback)),
            *("--policy", str(routing.policy)),
            *(("--session-header", routing.session_header) if routing.session_header else ()),
            *(("--lengths", lengths) if routing.lengths_config_map else ()),
            *(("--whole-below", str(short_prompt_tokens)) if short_prompt_tokens else ()),
            *(("--ahead-from", str(overlap_min_tokens)) if overlap_min_tokens else ()),
            *("--ttft-ms", f"{slo.ttft_ms:g}", "--tpot-ms", f"{slo.tpot_ms:g}"),
            *("--late", str(routing.late)),
            *("--queue-limit", str(routing.queue_limit)),
            *_build_flipping_flags(deployment.spec.pools),
            *("--drain-timeout", str(deployment.spec.template.drain_timeout_s)),
            *(("--api-keys", f"{_FILES}/{_KEYS}/keys") if gateway.keys_secret else ()),
            *(_build_tls_flags("--tls", _TLS) if gateway.tls_secret else ()),
            *_build_observability_flags(gateway),
        ],
        "env": build_address_env(get_agents_source(deployment.name, deployment.namespace)),
        "ports": [
            {"name": _get_scheme(deployment), "containerPort": port},
            {"name": _INTERNAL, "containerPort": internal_port},
        ],
        # A process is one event loop and never uses more than one core.
        "resources": {
            "requests": {
                "cpu": f"{500 * gateway.processes}m",
                "memory": f"{128 * gateway.processes}Mi",
            },
            "limits": {"memory": f"{gateway.processes}Gi"},
        },
        "readinessProbe": {
            "httpGet": {
                "path": "/health",
                "port": port,
                **({"scheme": "HTTPS"} if gateway.tls_secret else {}),
            },
            "periodSeconds": 2,
            "timeoutSeconds": 2,
        },
        "securityContext": build_container_security(),
        "volumeMounts": [build_scratch_volume("tmp", "/tmp")[1], *mounts],  # noqa: S108
    }


def _build_flipping_flags(pools: PoolsSpec) -> tuple[str, ...]:
    least = ("--min-prefill", str(pools.min_prefill), "--min-decode", str(pools.min_decode))
    return ("--flipping", str(pools.flipping), *least)


def _build_tls_flags(option: str, volume: str) -> tuple[str, ...]:
    """Entries are named as in secrets of type kubernetes.io/tls."""
    folder = f"{_FILES}/{volume}"
    return f"{option}-cert", f"{folder}/tls.crt", f"{option}-key", f"{folder}/tls.key"


def _build_picker_tls_flags(gateway: GatewaySpec) -> tuple[str, ...]:
    if gateway.endpoint_picker_plain:
        return ("--endpoint-picker-plain",)
    if gateway.endpoint_picker_tls_secret:
        return _build_tls_flags("--endpoint-picker", _PICKER_TLS)
    return ()


def _build_observability_flags(gateway: GatewaySpec) -> list[str]:
    flags = ["--access-log"] if gateway.access_log else []
    if gateway.tracing is not None:
        flags += ["--otlp-endpoint", gateway.tracing.endpoint]
        flags += ["--trace-share", f"{gateway.tracing.share:g}"]
    return flags
