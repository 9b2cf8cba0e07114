from typing import Any

import pytest

from cleave.local.kubelet.pod_spec import PodError, ProbeKind, format_gib, parse_pod


def pod(**container: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "p"},
        "spec": {"containers": [{"name": "m", "command": ["true"], **container}]},
    }


@pytest.mark.parametrize(
    ("requests", "limits", "cores"),
    [
        ({"cpu": "2"}, {"cpu": 2}, 2),
        ({}, {"cpu": "2"}, 2),
        ({"cpu": "1"}, {"cpu": "2"}, 0),
        ({"cpu": "1500m"}, {"cpu": "1500m"}, 0),
        ({"cpu": "1000m"}, {"cpu": "1"}, 1),
        ({"cpu": "2"}, {}, 0),
        ({}, {}, 0),
    ],
)
def test_cores_are_exclusive_when_request_and_limit_are_the_same_whole_number(
    requests: dict[str, Any], limits: dict[str, Any], cores: int
) -> None:
    spec = parse_pod(pod(resources={"requests": requests, "limits": limits}))
    assert spec.exclusive_cores == cores


def test_memory_and_gpus_are_read_as_quantities() -> None:
    limits = {"memory": "1.5Gi", "nvidia.com/gpu": "4"}
    spec = parse_pod(pod(resources={"limits": limits}))
    assert (spec.memory_bytes, spec.gpus) == (3 * 2**29, 4)


def test_probes_take_kubernetes_defaults_and_named_ports() -> None:
    spec = parse_pod(
        pod(
            ports=[{"name": "http", "containerPort": 8080}],
            readinessProbe={"httpGet": {"port": "http", "path": "/health"}, "periodSeconds": 2},
            livenessProbe={"grpc": {"port": 9000}},
        )
    )
    assert spec.readiness is not None
    assert (spec.readiness.kind, spec.readiness.port) == (ProbeKind.HTTP, 8080)
    assert (spec.readiness.period_s, spec.readiness.failure_threshold) == (2, 3)
    assert spec.liveness is not None
    assert (spec.liveness.kind, spec.liveness.target) == (ProbeKind.GRPC, "")
    assert spec.startup is None


def test_the_scheme_of_a_probe_is_read() -> None:
    probe = {"httpGet": {"port": 8443, "path": "/health", "scheme": "HTTPS"}}
    spec = parse_pod(pod(readinessProbe=probe))
    assert spec.readiness is not None
    assert (spec.readiness.kind, spec.readiness.target) == (ProbeKind.HTTPS, "/health")


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (pod(command=[]), "pod p: container m needs a command"),
        (pod(readinessProbe={"exec": {"command": ["x"]}}), "only grpc and httpGet"),
        (pod(resources={"limits": {"cpu": "much"}}), "'much' is not a quantity"),
        ({"metadata": {"name": "p"}, "spec": {"containers": []}}, "exactly one container"),
        ({"kind": "Pod"}, "not a v1 Pod"),
    ],
)
def test_a_pod_that_cannot_be_run_is_refused_with_its_reason(
    broken: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(PodError, match=complaint):
        parse_pod(broken)


def test_people_read_gibibytes() -> None:
    assert format_gib(3 * 2**29) == "1.5 GiB"
