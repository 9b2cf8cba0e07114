"""What manifests say, as values."""

import pytest

from cleave.controller.cluster.objects import parse_child, parse_pod


@pytest.mark.parametrize(
    ("replicas", "status", "is_updated"),
    [
        (2, {"replicas": 2, "updatedReplicas": 2}, True),
        (2, {"replicas": 3, "updatedReplicas": 2}, False),
        (2, {"replicas": 2}, False),
        # The API server leaves out counts of 0.
        (0, {}, True),
        (0, {"replicas": 1}, False),
    ],
)
def test_a_deployment_is_updated_when_all_its_replicas_are(replicas, status, is_updated) -> None:
    manifest = {
        "kind": "Deployment",
        "metadata": {"name": "chat-gateway", "generation": 3},
        "spec": {"replicas": replicas},
        "status": {"observedGeneration": 3, **status},
    }
    assert parse_child(manifest).is_updated is is_updated


@pytest.mark.parametrize(
    ("ports", "count"),
    [
        (["agent", "engine", "agent-1", "engine-1", "agent-2", "engine-2"], 3),
        (["agent", "engine"], 1),
        # A further node of an instance.
        ([], 1),
    ],
)
def test_a_pod_has_an_engine_for_each_agents_port(ports: list[str], count: int) -> None:
    labels = {"role": "mixed", "deployment": "chat", "pool": "chat-mixed"}
    manifest = {
        "metadata": {"name": "c", "labels": {f"cleave.dev/{k}": v for k, v in labels.items()}},
        "spec": {"containers": [{"ports": [{"name": name} for name in ports]}]},
    }
    pod = parse_pod(manifest)
    assert pod is not None
    assert pod.num_engines == count
