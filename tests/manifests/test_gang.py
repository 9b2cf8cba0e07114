"""Gangs: labels, annotations and PodGroups of instances that span nodes."""

from typing import Any

import pytest
from kubernetes.client import models

from cleave.api.pool import InstancePool
from cleave.manifests.gang import add_gang, build_pod_group
from cleave.manifests.labels import Manifest
from cleave.manifests.multi_node import build_node_pods
from cleave.manifests.worker import build_worker_pod

QUEUE = {"labels": {"kueue.x-k8s.io/queue-name": "serving"}}
VOLCANO = {"schedulerName": "volcano"}


def build_pool(nodes: int = 2, **template: Any) -> InstancePool:
    return InstancePool.model_validate(
        {
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "InstancePool",
            "metadata": {"name": "chat-decode"},
            "spec": {
                "deployment": "chat",
                "role": "decode",
                "parallelism": {"tensor": 8 * nodes},
                "nodes": nodes,
                "revision": "r1",
                "model": "m",
                "engine": {"type": "vLLM"},
                "template": template,
            },
        }
    )


def build_pods(pool: InstancePool, *, has_pod_groups: bool = False) -> list[Manifest]:
    leader = build_worker_pod(pool, "chat-decode-1")
    pods = [leader, *build_node_pods(pool, leader)]
    return [add_gang(pod, pool, "chat-decode-1", has_pod_groups=has_pod_groups) for pod in pods]


@pytest.mark.parametrize("template", [{}, QUEUE, VOLCANO])
def test_an_instance_of_one_pod_is_no_gang(template: dict[str, Any]) -> None:
    pool = build_pool(1, **template)
    pod = build_worker_pod(pool, "chat-decode-1")
    assert add_gang(pod, pool, "chat-decode-1", has_pod_groups=True) == pod
    assert build_pod_group(pool, "chat-decode-1", "u", has_pod_groups=True) is None


def test_without_a_queue_or_a_scheduler_of_gangs_pods_stay_as_they_are() -> None:
    pool = build_pool()
    leader = build_worker_pod(pool, "chat-decode-1")
    assert build_pods(pool) == [leader, *build_node_pods(pool, leader)]
    assert build_pod_group(pool, "chat-decode-1", "u") is None
    other = build_pool(schedulerName="kai-scheduler")
    assert build_pod_group(other, "chat-decode-1", "u", has_pod_groups=True) is None


def test_a_queue_of_kueue_admits_all_pods_of_an_instance_or_none() -> None:
    for pod in build_pods(build_pool(3, **QUEUE)):
        meta = pod["metadata"]
        assert meta["labels"]["kueue.x-k8s.io/queue-name"] == "serving"
        assert meta["labels"]["kueue.x-k8s.io/pod-group-name"] == "chat-decode-1"
        assert meta["annotations"]["kueue.x-k8s.io/pod-group-total-count"] == "3"
        assert meta["annotations"]["kueue.x-k8s.io/retriable-in-group"] == "false"
        # Such a group would never finish, and Kueue would keep its deleted pods.
        assert "kueue.x-k8s.io/pod-group-serving" not in meta["annotations"]


def list_unknown_fields(kind: Any, manifest: Manifest) -> list[str]:
    """Fields of a manifest that the API's type does not have."""
    return sorted(manifest.keys() - set(kind.attribute_map.values()))


def test_kubernetes_own_pod_group_counts_all_pods() -> None:
    pool = build_pool(2, priorityClassName="high")
    pods = build_pods(pool, has_pod_groups=True)
    assert [pod["spec"]["schedulingGroup"] for pod in pods] == [
        {"podGroupName": "chat-decode-1"}
    ] * 2
    group = build_pod_group(pool, "chat-decode-1", "u", has_pod_groups=True)
    assert group is not None
    assert (group["apiVersion"], group["kind"]) == ("scheduling.k8s.io/v1beta1", "PodGroup")
    assert group["metadata"]["name"] == "chat-decode-1"
    (owner,) = group["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": "v1", "kind": "Pod", "name": "chat-decode-1", "uid": "u"}
    assert group["spec"] == {
        "schedulingPolicy": {"gang": {"minCount": 2}},
        "priorityClassName": "high",
    }
    # The types of Kubernetes 1.37.
    for kind, part in (
        (models.V1beta1PodGroup, group),
        (models.V1beta1PodGroupSpec, group["spec"]),
        (models.V1beta1PodGroupSchedulingPolicy, group["spec"]["schedulingPolicy"]),
        (models.V1beta1GangSchedulingPolicy, group["spec"]["schedulingPolicy"]["gang"]),
        (models.V1PodSpec, pods[0]["spec"]),
        (models.V1PodSchedulingGroup, pods[0]["spec"]["schedulingGroup"]),
    ):
        assert not list_unknown_fields(kind, part)


def test_volcano_gets_its_own_pod_group_and_queue() -> None:
    queue = {"scheduling.volcano.sh/queue-name": "serving"}
    pool = build_pool(2, **VOLCANO, annotations=queue)
    for pod in build_pods(pool, has_pod_groups=True):
        assert pod["metadata"]["annotations"] | queue == pod["metadata"]["annotations"]
        assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "chat-decode-1"
        assert "schedulingGroup" not in pod["spec"]
    group = build_pod_group(pool, "chat-decode-1", "u", has_pod_groups=True)
    assert group is not None
    assert group["apiVersion"] == "scheduling.volcano.sh/v1beta1"
    assert group["spec"] == {"minMember": 2, "queue": "serving"}
