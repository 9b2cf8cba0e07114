"""What a deployment asks for that only a cluster can give."""

import pytest

from cleave.api.manifest import validate
from cleave.local.planning import find_unsupported

SECRET = {"name": "s", "key": "k"}


def faults(**spec) -> list[str]:
    deployment = validate(
        {
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "LLMDeployment",
            "metadata": {"name": "chat"},
            "spec": {"model": "org/model", "slo": {"ttftMs": 400, "tpotMs": 40}, **spec},
        }
    )
    return list(find_unsupported(deployment.spec))


def cached(source: str = "org/model", **cache) -> dict:
    return {"source": source, "cache": cache}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (
            {"model": cached(persistentVolumeClaim={"claimName": "models"})},
            "spec.model.cache.persistentVolumeClaim",
        ),
        ({"model": cached(image={"reference": "llama:1"})}, "spec.model.cache.image"),
        (
            {"model": cached("/llama", hostPath={"path": "/mnt/llama"})},
            "spec.model.cache.hostPath.path",
        ),
        ({"gateway": {"keysSecret": "keys"}}, "spec.gateway.keysSecret"),
        ({"gateway": {"tlsSecret": "tls"}}, "spec.gateway.tlsSecret"),
        ({"gateway": {"endpointPicker": True}}, "spec.gateway.endpointPicker"),
        (
            {"gateway": {"endpointPickerTlsSecret": "tls"}},
            "spec.gateway.endpointPickerTlsSecret",
        ),
        ({"gateway": {"routerTlsSecret": "tls"}}, "spec.gateway.routerTlsSecret"),
        (
            {"engine": {"env": [{"name": "K", "valueFrom": {"secretKeyRef": SECRET}}]}},
            "spec.engine.env.K",
        ),
        ({"paused": True}, "spec.paused"),
        ({"planning": {"mode": "Advisory"}}, "spec.planning.mode"),
    ],
)
def test_what_needs_a_cluster_is_refused_with_its_field_and_a_remedy(spec, field) -> None:
    (fault,) = faults(**spec)
    place, _, message = fault.partition(": ")
    assert place == field
    assert ";" in message, "what is wrong; what to do"


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"model": cached(hostPath={"path": "/var/models"})},
        {"model": cached("/llama", hostPath={"path": "/llama"})},
        {"gateway": {"replicas": 5, "image": "mine:1"}},
        {"rollout": {"maxSurge": 2}, "deletionPolicy": "Immediate"},
        {"template": {"drainTimeoutS": 5, "runtimeClassName": "nvidia"}},
    ],
)
def test_what_only_means_nothing_here_is_passed_over(spec) -> None:
    assert faults(**spec) == []
