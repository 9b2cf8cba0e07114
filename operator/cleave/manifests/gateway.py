"""The gateway: a pod on one machine, or a Deployment with its Service in a cluster. Pure.

Called by `cleave.local` and the controller.
"""

from cleave.api.deployment import LLMDeployment, WitnessSpec
from cleave.api.engine import TransferMode
from cleave.api.plan import SelectedPlan
from cleave.manifests import topology
from cleave.manifests.container import (
    LISTEN_ON,
    OWN_IMAGES,
    Images,
    build_address_env,
    build_container_security,
    build_flags,
    build_pod_defaults,
    build_scratch_volume,
)
from cleave.manifests.labels import (
    GATEWAY,
    GATEWAY_PORT,
    INTERNAL_PORT,
    PICKER_PORT,
    ROUTER_PORT,
    Manifest,
    build_component_labels,
    build_gateway_labels,
    build_object,
    get_agents_source,
    get_gateway_name,
)
from cleave.rpc.plan_thresholds import PlanThresholds

SHUTDOWN_DELAY_S = 8
"""After SIGTERM gateways accept requests for this many seconds, until all nodes route elsewhere. A
pod that is not deleted leaves its Service after three failed probes, which takes up to 6 s."""
GRACE_SLACK_S = SHUTDOWN_DELAY_S + 10
"""Seconds between the end of the drain and SIGKILL."""

_SCRATCH_MIB = 128
"""Disk space of each process."""
_INTERNAL = "internal"
_PICKER = "picker"
_ROUTER = "router"
_FILES = "/etc/cleave"
_KEYS, _TLS = "keys", "tls"
_PICKER_TLS, _ROUTER_TLS = "picker-tls", "router-tls"
"""Volumes, each mounted below _FILES by its name."""


def build_gateway_pod(
    deployment: LLMDeployment,
    *,
    host: str = LISTEN_ON,
    port: int = GATEWAY_PORT,
    internal_port: int = INTERNAL_PORT,
    plan: SelectedPlan | None = None,
) -> Manifest:
    """Pod of a deployment's gateway on one machine; it listens on host:port. `plan`: the current
    one."""
    flags = _build_flags(deployment, host, port, internal_port)
    thresholds = get_thresholds(deployment, plan)
    flags["--short-prompt-tokens"] = thresholds.whole_below_tokens or None
    flags["--overlap-min-tokens"] = thresholds.ahead_from_tokens or None
    # Such a machine has browsers, and no keys keep their pages away.
    flags["--allowed-hosts"] = "localhost"
    container = _build_container(deployment, flags, port, internal_port)
    name = get_gateway_name(deployment.name)
    labels = build_gateway_labels(deployment.name)
    spec = _build_pod_spec(deployment, container)
    return build_object("v1", "Pod", name, deployment.namespace, labels, spec=spec)


def get_thresholds(deployment: LLMDeployment, plan: SelectedPlan | None) -> PlanThresholds:
    """The thresholds of a plan that gateways apply; those of `ahead_from_tokens` with
    engine.transfer Auto only, as other modes leave no choice."""
    if plan is None:
        return PlanThresholds()
    is_auto = deployment.spec.engine.transfer is TransferMode.AUTO
    ahead_from = plan.ahead_from_tokens if is_auto else None
    return PlanThresholds(plan.whole_below_tokens or 0, ahead_from or 0)


def build_gateway_deployment(deployment: LLMDeployment, *, images: Images = OWN_IMAGES) -> Manifest:
    """The gateway in a cluster: identical pods, on different nodes where possible. The plan's
    thresholds come with the workers' Service, so that they change without a restart."""
    labels = build_component_labels(deployment.name, GATEWAY)
    pod_spec = _build_pod_spec(deployment, _build_cluster_container(deployment, images))
    pod_spec["topologySpreadConstraints"] = topology.build_topology_spread(labels)
    surge = {"maxSurge": 1, "maxUnavailable": 0}
    spec = {
        "replicas": deployment.spec.gateway.replicas,
        "selector": {"matchLabels": labels},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": surge},
        "template": {
            "metadata": {"labels": build_gateway_labels(deployment.name)},
            "spec": pod_spec,
        },
    }
    name = get_gateway_name(deployment.name)
    return build_object("apps/v1", "Deployment", name, deployment.namespace, labels, spec=spec)


def build_gateway_service(deployment: LLMDeployment) -> Manifest:
    """The Service for clients: the deployment's name, port 80, or 443 with a certificate."""
    gateway, labels = deployment.spec.gateway, build_component_labels(deployment.name, GATEWAY)
    scheme, port = _get_scheme(deployment), 443 if gateway.tls_secret else 80
    ports = [{"name": scheme, "port": port, "targetPort": scheme, "protocol": "TCP"}]
    if gateway.endpoint_picker:
        protocol = "kubernetes.io/h2c" if gateway.endpoint_picker_plain else "http2"
        picker = {"name": _PICKER, "port": PICKER_PORT, "targetPort": _PICKER, "protocol": "TCP"}
        ports.append({**picker, "appProtocol": protocol})
    if gateway.router_tls_secret:
        router = {"name": _ROUTER, "port": ROUTER_PORT, "targetPort": _ROUTER, "protocol": "TCP"}
        ports.append({**router, "appProtocol": "http2"})
    spec = {"type": "ClusterIP", "selector": labels, "ports": ports}
    name = deployment.name
    return build_object("v1", "Service", name, deployment.namespace, labels, spec=spec)


def build_url(deployment: LLMDeployment) -> str:
    """Base URL for OpenAI clients inside the cluster."""
    return f"{_get_scheme(deployment)}://{deployment.name}.{deployment.namespace}.svc/v1"


def _get_scheme(deployment: LLMDeployment) -> str:
    """URL scheme for clients, which is also the name of the port."""
    return "https" if deployment.spec.gateway.tls_secret else "http"


def _build_pod_spec(deployment: LLMDeployment, container: Manifest) -> Manifest:
    pull_secrets = [{"name": name} for name in deployment.spec.template.image_pull_secrets]
    return {
        **build_pod_defaults(),
        **({"imagePullSecrets": pull_secrets} if pull_secrets else {}),
        "terminationGracePeriodSeconds": deployment.spec.template.drain_timeout_s + GRACE_SLACK_S,
        "containers": [container],
        "volumes": [_build_scratch(deployment)[0], *_build_volumes(deployment)],
    }


def _build_scratch(deployment: LLMDeployment) -> tuple[Manifest, Manifest]:
    """For the state that processes share: tables, counters and samples of some MiB."""
    limit = f"{_SCRATCH_MIB * deployment.spec.gateway.processes}Mi"
    return build_scratch_volume("tmp", "/tmp", sizeLimit=limit)  # noqa: S108 - inside it


def _build_volumes(deployment: LLMDeployment) -> list[Manifest]:
    """Volumes with the files that the deployment refers to."""
    gateway = deployment.spec.gateway
    secrets = {
        _KEYS: gateway.keys_secret,
        _TLS: gateway.tls_secret,
        _PICKER_TLS: gateway.endpoint_picker_tls_secret if gateway.endpoint_picker else None,
        _ROUTER_TLS: gateway.router_tls_secret,
    }
    return [
        {"name": name, "secret": {"secretName": secret, "optional": False}}
        for name, secret in secrets.items()
        if secret
    ]


def _build_cluster_container(deployment: LLMDeployment, images: Images) -> Manifest:
    """The container in a cluster: with a shutdown delay and a liveness probe."""
    gateway, scaling = deployment.spec.gateway, deployment.spec.scaling
    flags = _build_flags(deployment, LISTEN_ON, GATEWAY_PORT, INTERNAL_PORT)
    flags["--shutdown-delay"] = SHUTDOWN_DELAY_S
    flags["--wake-timeout"] = scaling.wake_timeout_s if scaling.idle_s is not None else None
    if gateway.endpoint_picker:
        flags["--endpoint-picker-port"] = PICKER_PORT
        if gateway.endpoint_picker_plain:
            flags["--endpoint-picker-plain"] = True
        elif gateway.endpoint_picker_tls_secret:
            flags |= _build_tls_flags("--endpoint-picker", _PICKER_TLS)
    if gateway.router_tls_secret:
        flags["--router-port"] = ROUTER_PORT
        flags |= _build_tls_flags("--router", _ROUTER_TLS)
        flags["--router-client-ca"] = f"{_FILES}/{_ROUTER_TLS}/ca.crt"
    container = _build_container(deployment, flags, GATEWAY_PORT, INTERNAL_PORT, images)
    if gateway.endpoint_picker:
        container["ports"].append({"name": _PICKER, "containerPort": PICKER_PORT})
    if gateway.router_tls_secret:
        container["ports"].append({"name": _ROUTER, "containerPort": ROUTER_PORT})
    # /health depends on workers; /livez responds in time under any load.
    container["livenessProbe"] = {
        "httpGet": {"path": "/livez", "port": INTERNAL_PORT},
        "initialDelaySeconds": 30,
        "periodSeconds": 10,
        "timeoutSeconds": 5,
        "failureThreshold": 3,
    }
    return container


def _build_flags(
    deployment: LLMDeployment, host: str, port: int, internal_port: int
) -> dict[str, object]:
    """Flags that need no cluster; `internal_port` serves the operator, without API keys."""
    spec = deployment.spec
    gateway, routing, slo, pools = spec.gateway, spec.routing, spec.slo, spec.pools
    scheduling = spec.engine.scheduling
    names = [spec.model.name, *gateway.model_aliases]
    return {
        "--host": host,
        "--port": port,
        "--internal-port": internal_port,
        "--agents": "$(CLEAVE_AGENTS)",
        "--deployment": deployment.name,
        "--model-names": ",".join(names) if len(names) > 1 else None,
        "--processes": gateway.processes if gateway.processes > 1 else None,
        "--fallback": routing.fallback,
        "--policy": routing.policy,
        "--session-header": routing.session_header,
        "--ttft-ms": slo.ttft_ms,
        "--tpot-ms": slo.tpot_ms,
        "--itl-p99-ms": slo.itl_p99_ms,
        "--send-targets": scheduling is not None and scheduling.uses_targets,
        "--late-requests": routing.late,
        "--queue-limit": routing.queue_limit,
        "--flipping": spec.flipping,
        "--min-prefill": pools.min_prefill,
        "--min-decode": pools.min_decode,
        "--drain-timeout": spec.template.drain_timeout_s,
        "--api-keys": gateway.keys_secret and f"{_FILES}/{_KEYS}/keys",
        **(_build_tls_flags("--tls", _TLS) if gateway.tls_secret else {}),
        **_build_witness_flags(spec.witness),
        "--allowed-origins": gateway.cors and ",".join(gateway.cors.allowed_origins),
        "--access-log": gateway.access_log,
        "--otlp-endpoint": gateway.tracing and gateway.tracing.endpoint,
        "--trace-share": gateway.tracing and gateway.tracing.share,
    }


def _build_witness_flags(witness: WitnessSpec) -> dict[str, object]:
    """Only what is not the gateway's default: an image of the version before has no such flags."""
    share = witness.engine_share
    return {} if share == WitnessSpec().engine_share else {"--witness-share": share}


def _build_tls_flags(option: str, volume: str) -> dict[str, object]:
    """Entries are named as in secrets of type kubernetes.io/tls."""
    folder = f"{_FILES}/{volume}"
    return {f"{option}-cert": f"{folder}/tls.crt", f"{option}-key": f"{folder}/tls.key"}


def _build_container(
    deployment: LLMDeployment,
    flags: dict[str, object],
    port: int,
    internal_port: int,
    images: Images = OWN_IMAGES,
) -> Manifest:
    gateway = deployment.spec.gateway
    mounts = [
        {"name": each["name"], "mountPath": f"{_FILES}/{each['name']}", "readOnly": True}
        for each in _build_volumes(deployment)
    ]
    scheme = {"scheme": "HTTPS"} if gateway.tls_secret else {}
    # A process is one event loop and never uses more than one core.
    requests = {
        "cpu": f"{500 * gateway.processes}m",
        "memory": f"{128 * gateway.processes}Mi",
        "ephemeral-storage": f"{_SCRATCH_MIB * gateway.processes}Mi",
    }
    return {
        "name": "gateway",
        "image": gateway.image or images.get("gateway"),
        "command": ["python", "-m", "cleave.gateway.main", *build_flags(flags)],
        "env": build_address_env(get_agents_source(deployment.name, deployment.namespace)),
        "ports": [
            {"name": _get_scheme(deployment), "containerPort": port},
            {"name": _INTERNAL, "containerPort": internal_port},
        ],
        "resources": {"requests": requests, "limits": {"memory": f"{gateway.processes}Gi"}},
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": port, **scheme},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
        },
        "securityContext": build_container_security(),
        "volumeMounts": [_build_scratch(deployment)[1], *mounts],
    }
