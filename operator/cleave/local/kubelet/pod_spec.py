"""Parses and validates the fields of a Kubernetes v1 Pod that the process kubelet supports.

Called by the kubelet when a pod is admitted. Partial support of a field is worse than rejecting it,
so a pod that needs more than one plain container is rejected with a reason, while fields without
meaning for processes (image, volumes, security context) are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cleave.api.pods.quantity import parse_quantity
from cleave.manifests.labels import AGENT_PORT, GPU, Manifest

DEFAULT_GRACE_S = 30


class PodError(ValueError):
    """The pod cannot run on this machine; one line with the reason."""


class RestartPolicy(StrEnum):
    """When a container that ended is started again."""

    ALWAYS = "Always"
    ON_FAILURE = "OnFailure"
    NEVER = "Never"


class ProbeKind(StrEnum):
    """The protocol of a probe."""

    GRPC = "grpc"
    HTTP = "HTTP"
    HTTPS = "HTTPS"


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe with Kubernetes' defaults; `target` is the gRPC service or the HTTP path."""

    kind: ProbeKind
    port: int
    target: str
    initial_delay_s: float = 0
    period_s: float = 10
    timeout_s: float = 1
    failure_threshold: int = 3
    success_threshold: int = 1


@dataclass(frozen=True, slots=True)
class PodSpec:
    """The fields of a pod that the kubelet uses."""

    name: str
    namespace: str
    labels: Mapping[str, str]
    container: str
    image: str
    command: tuple[str, ...]
    """Command and arguments, `$(VAR)` not yet expanded."""
    env: tuple[Manifest, ...]
    ports: tuple[int, ...]
    agent_ports: tuple[int, ...]
    """Where its agents listen, if it is a worker pod."""
    exclusive_cores: int
    """Number of exclusive cores; 0: it runs on the shared ones."""
    memory_bytes: int
    gpus: int
    grace_s: float
    restart_policy: RestartPolicy
    host_network: bool
    readiness: Probe | None
    liveness: Probe | None
    startup: Probe | None


def parse_pod(pod: Manifest) -> PodSpec:
    """Parse the supported fields. Raises PodError with one line when the pod cannot run here."""
    try:
        return _parse_pod(pod)
    except (KeyError, TypeError, AttributeError) as error:
        raise PodError(f"pod is not a v1 Pod: {error!r}") from error
    except ValueError as error:
        raise PodError(f"pod {pod['metadata']['name']}: {error}") from error


def format_gib(size_bytes: int) -> str:
    """Format `size_bytes` in GiB: `1.5 GiB`."""
    return f"{size_bytes / 2**30:.1f} GiB"


def _parse_pod(pod: Manifest) -> PodSpec:
    metadata, spec = pod["metadata"], pod["spec"]
    container = _get_only_container(spec)
    declared = _get_list(container, "ports")
    ports = {str(port.get("name", "")): int(port["containerPort"]) for port in declared}
    requests, limits = _get_resources(container)
    return PodSpec(
        name=metadata["name"],
        namespace=metadata.get("namespace", "default"),
        labels=dict(metadata.get("labels") or {}),
        container=container["name"],
        image=container.get("image", ""),
        command=tuple(map(str, [*_get_list(container, "command"), *_get_list(container, "args")])),
        env=tuple(_get_list(container, "env")),
        ports=tuple(int(port["containerPort"]) for port in declared),
        agent_ports=tuple(number for name, number in ports.items() if name.startswith("agent"))
        or (AGENT_PORT,),
        exclusive_cores=_count_exclusive_cores(requests, limits),
        memory_bytes=int(parse_quantity(requests.get("memory", 0))),
        gpus=int(limits.get(GPU, 0)),
        grace_s=float(spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S)),
        restart_policy=RestartPolicy(spec.get("restartPolicy", "Always")),
        host_network=bool(spec.get("hostNetwork", False)),
        readiness=_parse_probe(container.get("readinessProbe"), ports),
        liveness=_parse_probe(container.get("livenessProbe"), ports),
        startup=_parse_probe(container.get("startupProbe"), ports),
    )


def _get_only_container(spec: Manifest) -> Manifest:
    containers: list[Manifest] = spec["containers"]
    if len(containers) != 1 or spec.get("initContainers"):
        raise ValueError("a process pod has exactly one container and no init containers")
    if not containers[0].get("command"):
        raise ValueError(f"container {containers[0]['name']} needs a command: images are not used")
    return containers[0]


def _get_list(container: Manifest, field: str) -> list[Any]:
    return list(container.get(field) or [])


def _get_resources(container: Manifest) -> tuple[Manifest, Manifest]:
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    # As in Kubernetes, a limit without a request is the request too.
    return {**limits, **(resources.get("requests") or {})}, limits


def _count_exclusive_cores(requests: Manifest, limits: Manifest) -> int:
    """Kubernetes' static CPU policy: whole cores when request and limit are the same integer."""
    request, limit = (parse_quantity(each.get("cpu", 0)) for each in (requests, limits))
    return int(request) if request == limit and request == int(request) else 0


def _parse_probe(probe: Manifest | None, ports: Mapping[str, int]) -> Probe | None:
    if not probe:
        return None
    kind, target, port = _parse_probe_target(probe)
    return Probe(
        kind=kind,
        port=ports[port] if isinstance(port, str) and port in ports else int(port),
        target=target,
        initial_delay_s=float(probe.get("initialDelaySeconds", 0)),
        period_s=float(probe.get("periodSeconds", 10)),
        timeout_s=float(probe.get("timeoutSeconds", 1)),
        failure_threshold=int(probe.get("failureThreshold", 3)),
        success_threshold=int(probe.get("successThreshold", 1)),
    )


def _parse_probe_target(probe: Manifest) -> tuple[ProbeKind, str, int | str]:
    if grpc := probe.get("grpc"):
        return ProbeKind.GRPC, grpc.get("service") or "", grpc["port"]
    if http := probe.get("httpGet"):
        return ProbeKind(http.get("scheme") or "HTTP"), http.get("path", "/"), http["port"]
    raise ValueError("only grpc and httpGet probes can be run")
