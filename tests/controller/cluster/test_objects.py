"""What manifests say, as values."""

from collections.abc import Mapping

import pytest

from cleave.controller.cluster.objects import ObservedPod, count_engines, parse_child, parse_pod


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
    ("ports", "component", "count"),
    [
        (["agent", "engine", "agent-1", "engine-1", "agent-2", "engine-2"], "worker", 3),
        (["agent", "engine"], "worker", 1),
        ([], "worker", 1),
        # Another part of an engine over nodes.
        ([], "follower", 0),
    ],
)
def test_a_pod_has_an_engine_for_each_agents_port(
    ports: list[str], component: str, count: int
) -> None:
    containers = [{"ports": [{"name": name} for name in ports]}]
    found = parse_worker({"component": component}, spec={"containers": containers})
    assert found.num_engines == count


@pytest.mark.parametrize(("instance", "is_further"), [("c", False), ("b", True)])
def test_a_further_pod_has_the_name_of_another_ones_instance(
    instance: str, is_further: bool
) -> None:
    found = parse_worker({"instance": instance})
    assert (found.is_multi_node_worker, found.instance_name) == (is_further, instance)


def test_the_engines_of_an_instance_are_those_of_all_its_pods() -> None:
    ranks = {"spec": {"containers": [{"ports": [{"name": "agent"}, {"name": "agent-1"}]}]}}
    first, further = parse_worker(**ranks), parse_worker({"instance": "c"}, name="c-1", **ranks)
    part = parse_worker({"instance": "d", "component": "follower"}, name="d-1")
    assert count_engines([first, further, parse_worker(name="d"), part]) == {"c": 4, "d": 1}


def parse_worker(
    more: Mapping[str, str] = {},
    *,
    name: str = "c",
    annotations: Mapping[str, str] = {},
    **fields,
) -> ObservedPod:
    labels = {"role": "mixed", "deployment": "chat", "pool": "chat-mixed", **more}
    labels = {f"cleave.dev/{key}": value for key, value in labels.items()}
    meta = {"name": name, "labels": labels, "annotations": annotations}
    pod = parse_pod({"metadata": meta, **fields})
    assert pod is not None
    return pod


DENIED = 'rpc error: code = NotFound desc = failed to pull and unpack image "r/none:1"'


@pytest.mark.parametrize(
    ("reason", "message", "fault"),
    [
        ("ContainerCreating", "", ""),
        ("PodInitializing", "", ""),
        # It has started before: how it ended says more.
        ("CrashLoopBackOff", "back-off 10s restarting failed container", ""),
        ("ErrImagePull", DENIED, f"ErrImagePull: {DENIED}"),
        # The kubelet alternates between the two, and the text must not.
        (
            "ImagePullBackOff",
            f'Back-off pulling image "r/none:1": ErrImagePull: {DENIED}',
            f"ErrImagePull: {DENIED}",
        ),
        ("ImagePullBackOff", "", "ErrImagePull: r/none:1"),
        ("CreateContainerConfigError", 'secret "k" not found', None),
        ("InvalidImageName", "", "InvalidImageName"),
    ],
)
def test_why_the_kubelet_cannot_start_a_pod(reason: str, message: str, fault: str | None) -> None:
    waiting = {"reason": reason, "message": message}
    status = {"containerStatuses": [{"image": "r/none:1", "state": {"waiting": waiting}}]}
    expected = f"{reason}: {message}" if fault is None else fault
    assert parse_worker(status=status).start_fault == expected


@pytest.mark.parametrize(
    ("terminated", "last_end"),
    [
        ({}, ""),
        ({"reason": "OOMKilled", "exitCode": 137}, "OOMKilled"),
        ({"reason": "Error", "exitCode": 2}, "exit code 2"),
    ],
)
def test_how_a_container_ended_last(terminated: dict, last_end: str) -> None:
    last_state = {"terminated": terminated} if terminated else {}
    status = {"containerStatuses": [{"restartCount": 2, "lastState": last_state}]}
    assert parse_worker(status=status).last_end == last_end


def test_a_deployment_says_why_its_pods_are_refused() -> None:
    refused = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota: q"}
    manifest = {
        "kind": "Deployment",
        "metadata": {"name": "chat-gateway"},
        "status": {"conditions": [refused]},
    }
    assert parse_child(manifest).fault == "exceeded quota: q"
    refused["status"] = "False"
    assert parse_child(manifest).fault == ""


def test_a_pod_has_what_was_seen_of_its_weights() -> None:
    labels = {"revision": "r1.a1", "weights": "a1"}
    found = parse_worker(labels, annotations={"cleave.dev/weights-read-ms": "1500"})
    assert (found.revision, found.spec_revision) == ("r1.a1", "r1")
    assert (found.weights, found.weights_read_ms) == ("a1", 1_500)
    for text in ("", "-1", "x", "²"):
        odd = parse_worker(labels, annotations={"cleave.dev/weights-read-ms": text})
        assert odd.weights_read_ms == 0
