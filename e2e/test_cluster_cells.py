"""Cells of Algorithm 2, each in one pod: planned, placed, rolled out, drained, lost."""

from collections.abc import Iterator

import pytest

from e2e.cluster.closed_loop_load import Load
from e2e.cluster.cluster import Cluster, wait_until
from e2e.cluster.nodes import Nodes, gpu_node
from e2e.test_cluster_operator import (
    READY_S,
    Chat,
    condition,
    installation,
    is_pod_ready,
    nodes,
    read_log,
)

__all__ = ["nodes"]

NETWORK = "planning.network.kind=Ethernet,planning.network.bandwidthGbps=25"
NVLINK = "planning.network.cellBandwidthGbps=2880"
"""As KV self-tests of cells would have shown it."""
CELLS = """
apiVersion: cleave.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: {source: facebook/opt-13b, servedName: chat, maxModelLen: 8192}
  slo: {ttftMs: 400, tpotMs: 40}
  engine: {type: Emulated, emulated: {timeScale: 0.2}}
  placement:
    manual:
      - {role: prefill, replicas: 2, perCell: 1}
      - {role: decode, replicas: 4, perCell: 2}
"""
PLANNED = """
apiVersion: cleave.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: {source: facebook/opt-13b, servedName: chat, maxModelLen: 8192}
  slo: {ttftMs: 400, tpotMs: 40}
  engine: {type: Emulated}
  workload: {rate: 12, promptTokens: {mean: 512}, outputTokens: {mean: 64}}
  planning: {affinity: Low, maxGPUs: 8}
"""

UNNAMED = """
apiVersion: cleave.dev/v1alpha1
kind: LLMDeployment
metadata: {name: chat}
spec:
  model: {source: meta-llama/Llama-3.1-8B, servedName: chat}
  slo: {ttftMs: 400, tpotMs: 7}
  workload: {rate: 6, promptTokens: {mean: 4000}, outputTokens: {mean: 300}}
  template: {nodeSelector: {example.com/cells: "1"}}
"""
"""On nodes whose network is Ethernet, and which start no engines, as these need GPUs."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def installed(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster whose operator counts on NVLink between engines of one pod."""
    with installation(cluster, "--set", f"{NETWORK},{NVLINK}"):
        yield cluster


@pytest.fixture
def start(installed: Cluster, namespace: str, nodes: Nodes) -> Iterator[Chat]:
    """The namespace's deployment, which the test applies; deleted afterwards."""
    yield Chat(installed, namespace)
    installed.kubectl("delete", "llmd", "--all", "-n", namespace, timeout_s=180)
    left = Chat(installed, namespace).workers()
    assert left == [], "cells have drained"


def apply(chat: Chat, manifest: str) -> None:
    chat.cluster.kubectl("apply", "-n", chat.namespace, "-f", "-", input=manifest)
    chat.until_ready()


def names(pods: list[dict]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}


def test_a_plan_by_algorithm_2_runs_as_one_pod_for_each_cell(start: Chat) -> None:
    apply(start, PLANNED)
    plan = start.deployment["status"]["plan"]
    assert plan["algorithm"].startswith("Algorithm 2")
    sizes = {pool["role"]: pool["replicas"] // pool["perCell"] for pool in plan["pools"]}
    assert sizes["prefill"] == sizes["decode"] == len(start.workers("mixed"))
    assert len(start.workers()) == len(start.workers("mixed"))
    assert start.ask() == ""


def test_a_plan_chooses_cells_of_one_pod_where_their_link_was_seen(
    start: Chat, nodes: Nodes
) -> None:
    nodes.add(*(gpu_node(f"cells-{number}", infiniband=False) for number in range(2)))
    try:
        for number in range(2):
            start.cluster.kubectl("label", "node", f"cells-{number}", "example.com/cells=1")
            # Plans count it for some minutes more, and no pod is started there.
            start.cluster.kubectl("cordon", f"cells-{number}")
        start.cluster.kubectl("apply", "-n", start.namespace, "-f", "-", input=UNNAMED)
        wait_until(lambda: start.workers("mixed"), READY_S, "cells are created")
        plan = start.deployment["status"]["plan"]
        assert plan["predicted"]["kvLink"]["kind"] == "NVLink"
        (pool,) = start.cluster.list("ipool", start.namespace)
        assert [each["role"] for each in pool["spec"]["members"]] == ["prefill", "decode"]
        assert pool["spec"]["revision"] == plan["revision"]
        assert len(start.workers()) == len(start.workers("mixed")) == pool["spec"]["replicas"]
    finally:
        for number in range(2):
            nodes.lose(f"cells-{number}")
            start.cluster.kubectl("delete", "node", f"cells-{number}")


def test_a_cell_serves_is_replaced_and_drained_as_a_unit(start: Chat) -> None:
    apply(start, CELLS)
    before = names(start.workers())
    assert len(before) == 2
    (pool,) = start.cluster.list("ipool", start.namespace)
    assert pool["status"]["ready"] == pool["status"]["serving"] == 2
    # Every member has handed KV over to one of another role.
    wait_until(lambda: condition(start.deployment, "KVPathVerified") == "True", 60, "verified")

    def is_rolled_out() -> bool:
        return start.is_ready() and not before & names(start.workers())

    with Load(start.address, "chat") as load:
        wait_until(lambda: load.answered > 20, 120, "the load is on")
        start.edit({"engine": {"env": [{"name": "EDITED", "value": "1"}]}})
        try:
            wait_until(is_rolled_out, READY_S, "every cell is replaced")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{read_log(start.cluster, start.namespace)}") from error
        after = load.answered
        wait_until(lambda: load.answered > after + 20, 120, "the new cells answer")
        # One cell is drained: the other one serves, and a new one comes.
        gone = sorted(names(start.workers()))[0]
        start.cluster.kubectl("delete", "pod", gone, "-n", start.namespace, "--wait=false")
        wait_until(
            lambda: gone not in names(start.workers()) and start.is_ready(), READY_S, "replaced"
        )
    assert load.failures == []
    start.edit({"placement": {"manual": [
        {"role": "prefill", "replicas": 3, "perCell": 1},
        {"role": "decode", "replicas": 6, "perCell": 2},
    ]}})  # fmt: skip
    start.until_ready()
    cells = start.workers("mixed")
    assert len(cells) == 3
    assert all(map(is_pod_ready, cells))


def test_a_cell_that_is_killed_starts_again_as_a_whole(start: Chat, nodes: Nodes) -> None:
    apply(start, CELLS)
    name = sorted(names(start.workers()))[0]
    nodes.kill(name)

    def restarts() -> int:
        (pod,) = [each for each in start.workers() if each["metadata"]["name"] == name]
        statuses = pod["status"].get("containerStatuses", [])
        return sum(each["restartCount"] for each in statuses)

    wait_until(lambda: restarts() >= 1, 60, "the container has started again")
    start.until_ready()
    assert start.ask() == ""
