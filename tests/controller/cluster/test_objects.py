"""What manifests say, as values."""

import pytest

from cleave.controller.cluster.objects import parse_child


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
