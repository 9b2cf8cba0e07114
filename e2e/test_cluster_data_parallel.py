"""Data-parallel ranks over two nodes of a cluster: one instance that is made, lost and drained."""

from collections.abc import Iterator

import pytest

from e2e.cluster.cluster import Cluster, Manifest, wait_until
from e2e.cluster.nodes import Nodes
from e2e.test_cluster_operator import installed, is_pod_ready, nodes

__all__ = ["installed", "nodes"]

POOL = """
apiVersion: cleave.dev/v1alpha1
kind: InstancePool
metadata: {name: wide-mixed}
spec:
  deployment: wide
  role: mixed
  owner: Manual
  revision: first
  nodes: 2
  parallelism: {data: 4}
  model: {source: facebook/opt-13b, servedName: wide, maxModelLen: 8192}
  engine: {type: Emulated}
  template: {drainTimeoutS: 20}
"""
READY_S = 120

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def pool(installed: Cluster, namespace: str) -> Iterator[Cluster]:
    """The cluster with a pool of one instance in two pods, ready; deleted afterwards."""
    installed.kubectl("apply", "-n", namespace, "-f", "-", input=POOL)
    try:
        wait_until(lambda: len(find_ready(installed, namespace)) == 2, READY_S, "both are ready")
        yield installed
    finally:
        installed.kubectl("delete", "ipool", "--all", "-n", namespace, timeout_s=120)
    assert installed.list("pods", namespace) == []


def find_ready(cluster: Cluster, namespace: str) -> dict[str, Manifest]:
    """Pods of the instance that are ready and stay, by name."""
    return {
        pod["metadata"]["name"]: pod
        for pod in cluster.list("pods", namespace)
        if is_pod_ready(pod) and "deletionTimestamp" not in pod["metadata"]
    }


def count_restarts(pods: dict[str, Manifest], name: str) -> int:
    (status,) = pods[name]["status"]["containerStatuses"]
    return int(status["restartCount"])


def test_an_instance_over_two_nodes_is_one_to_the_operator(pool: Cluster, namespace: str) -> None:
    first, further = sorted(find_ready(pool, namespace))
    assert further == f"{first}-1"

    def is_one_ready() -> bool:
        found = pool.get("ipool", "wide-mixed", namespace)
        assert found is not None
        return (found["status"]["replicas"], found["status"]["ready"]) == (1, 1)

    wait_until(is_one_ready, READY_S, "the status counts one instance, which is ready")
    (agents,) = (
        each
        for each in pool.list("endpointslices", namespace)
        if each["metadata"]["name"].startswith("wide-workers")
    )
    assert len(agents["endpoints"]) == 2
    assert {port["name"] for port in agents["ports"]} == {"agent", "agent-1"}

    # A deleted pod takes the other one along, and another instance comes.
    pool.kubectl("delete", "pod", further, "-n", namespace, "--wait=false")
    wait_until(
        lambda: len(ready := find_ready(pool, namespace)) == 2 and first not in ready,
        READY_S,
        "another instance is ready",
    )


def test_a_container_that_has_ended_joins_again(
    pool: Cluster, nodes: Nodes, namespace: str
) -> None:
    first, further = sorted(find_ready(pool, namespace))
    nodes.kill(further)

    def is_back() -> bool:
        pods = find_ready(pool, namespace)
        return {*pods} == {first, further} and count_restarts(pods, further) == 1

    wait_until(is_back, READY_S, "the further pod has joined again")
    log = nodes.log(first)
    assert "has left" in log
    assert "start 2" in log
