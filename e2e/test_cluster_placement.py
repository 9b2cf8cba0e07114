"""Where Kubernetes' own scheduler puts the pods of a plan.

The pods are those of the controller, with a sleeping process instead of an engine.
"""

from typing import Any

import pytest

from cleave.api.deployment import LLMDeployment
from cleave.api.pool import InstancePool
from cleave.manifests.cell_pod import build_cell_pod
from cleave.manifests.credentials import name_accounts
from cleave.manifests.multi_node import build_node_pods
from cleave.manifests.owned_objects import build_accounts
from cleave.manifests.pool import build_pools
from cleave.manifests.topology import CLIQUE, HOSTNAME, INFINIBAND, NodeTopology, assign_cells
from cleave.manifests.worker import build_worker_pod
from cleave.planner.placement import choose_placement
from cleave.planner.resolved_deployment import resolve_in_cluster

from e2e.cluster.cluster import Cluster, wait_until
from e2e.cluster.nodes import gpu_node
from tests.support.node_terms import REQUIRED
from tests.support.resource_cases import manifest

pytestmark = pytest.mark.timeout(900)

H100 = "NVIDIA-H100-80GB-HBM3"
L40S = "NVIDIA-L40S"


@pytest.fixture
def nodes(cluster: Cluster):
    """Adds nodes, which are gone after the test."""
    if cluster.nodes is None:
        pytest.skip("needs nodes with GPUs that a test may make up")
    names: list[str] = []

    def add(*shapes) -> None:
        cluster.nodes.add(*shapes)
        names.extend(shape.name for shape in shapes)
        # New nodes are tainted one by one until they are seen to be ready.
        wait_until(lambda: _are_open(cluster, names), 40, "nodes are open to pods")

    yield add
    for name in names:
        cluster.nodes.lose(name)
        cluster.kubectl("delete", "node", name)


def _are_open(cluster: Cluster, names: list[str]) -> bool:
    nodes = {node["metadata"]["name"]: node for node in cluster.list("nodes")}
    return all(name in nodes and not nodes[name]["spec"].get("taints") for name in names)


def build_pods(
    namespace: str, machines: NodeTopology, *manual: dict[str, Any], **spec: Any
) -> list[dict[str, Any]]:
    """All pods of a placement, in the order in which two pools' controllers might make them."""
    document = manifest(placement={"manual": list(manual)}, engine={"connector": "Nixl"}, **spec)
    document["metadata"]["namespace"] = namespace
    chat = LLMDeployment.model_validate(document)
    pods = []
    resolved = resolve_in_cluster(chat)
    for pool in build_pools(resolved, choose_placement(resolved), machines):
        for ordinal, cell in enumerate(_cells(pool)):
            if pool.spec.members:
                pods.append(build_cell_pod(pool, f"{pool.name}-{ordinal}"))
                continue
            leader = build_worker_pod(pool, ordinal, cell=cell)
            pods += [leader, *build_node_pods(pool, leader)]
    return [_asleep(pod) for pod in pods]


def _cells(pool: InstancePool) -> list[int | None]:
    count = pool.spec.replicas
    if pool.spec.colocation is None:
        return [None] * count
    return list(assign_cells([], pool.spec.colocation.per_cell, count))


def _asleep(pod: dict[str, Any]) -> dict[str, Any]:
    (worker,) = pod["spec"]["containers"]
    fixed_fields = {key: worker[key] for key in ("name", "image", "resources", "securityContext")}
    worker.clear()
    worker.update(fixed_fields, command=["sleep", "600"])
    worker["resources"]["requests"] = worker["resources"]["limits"] = {
        name: amount
        for name, amount in worker["resources"]["limits"].items()
        if name == "nvidia.com/gpu"
    }
    del pod["spec"]["volumes"]
    return pod


def placed(cluster: Cluster, namespace: str, pods: list[dict[str, Any]]) -> dict[str, str]:
    """Node of each pod, once all have one."""
    document = manifest()
    document["metadata"]["namespace"] = namespace
    deployment = LLMDeployment.model_validate(document)
    accounts = build_accounts(deployment, name_accounts(namespace, deployment.name))
    cluster.apply(*accounts, *pods, namespace=namespace)

    def found() -> dict[str, str] | None:
        seen = {
            pod["metadata"]["name"]: pod["spec"].get("nodeName", "")
            for pod in cluster.list("pods", namespace)
        }
        return seen if len(seen) == len(pods) and all(seen.values()) else None

    return wait_until(found, 40, "all pods have a node")


def test_a_cell_that_fits_a_node_is_one_pod(cluster: Cluster, nodes, namespace: str) -> None:
    nodes(*(gpu_node(f"cell-{number}") for number in range(3)))
    pods = build_pods(
        namespace,
        NodeTopology({H100: 8}),
        {"role": "prefill", "replicas": 3, "perCell": 1, "parallelism": {"tensor": 2}},
        {"role": "decode", "replicas": 9, "perCell": 3, "parallelism": {"tensor": 2}},
    )
    where = placed(cluster, namespace, pods)
    assert len(where) == len(set(where.values())) == 3


def test_equal_stages_share_a_node_where_an_instance_takes_two(
    cluster: Cluster, nodes, namespace: str
) -> None:
    nodes(*(gpu_node(f"stage-{number}") for number in range(2)))
    size = {"tensor": 4, "pipeline": 2}
    pods = build_pods(
        namespace,
        NodeTopology({H100: 8}),
        {"role": "prefill", "gpu": "H100", "perCell": 1, "parallelism": size},
        {"role": "decode", "gpu": "H100", "perCell": 1, "parallelism": size},
    )
    where = placed(cluster, namespace, pods)
    assert where["chat-prefill-0"] == where["chat-decode-0"]
    assert where["chat-prefill-0-1"] == where["chat-decode-0-1"]
    assert where["chat-prefill-0"] != where["chat-prefill-0-1"]


def test_a_cell_larger_than_a_node_shares_a_clique(cluster: Cluster, nodes, namespace: str) -> None:
    racks = {f"rack-{number}": f"clique-{number % 2}" for number in range(4)}
    nodes(*(gpu_node(name, gpus=4, clique=clique) for name, clique in racks.items()))
    pods = build_pods(
        namespace,
        NodeTopology({H100: 4}, CLIQUE),
        {"role": "prefill", "perCell": 1, "parallelism": {"tensor": 4}},
        {"role": "decode", "perCell": 1, "parallelism": {"tensor": 4}},
    )
    where = placed(cluster, namespace, pods)
    assert len(set(where.values())) == 2
    assert len({racks[node] for node in where.values()}) == 1


def test_without_cells_pods_keep_to_one_infiniband_domain_while_there_is_room(
    cluster: Cluster, nodes, namespace: str
) -> None:
    shapes = [gpu_node(f"fabric-{number}") for number in range(4)]
    nodes(*shapes)
    for number, shape in enumerate(shapes):
        label = f"{INFINIBAND}=fabric-{number % 2}"
        cluster.kubectl("label", "node", shape.name, label)
    pods = build_pods(
        namespace,
        NodeTopology({H100: 8}, HOSTNAME),
        {"role": "prefill", "replicas": 1, "parallelism": {"tensor": 8}},
        {"role": "decode", "replicas": 1, "parallelism": {"tensor": 8}},
    )
    where = placed(cluster, namespace, pods)
    assert len(set(where.values())) == 2
    assert len({int(node[-1]) % 2 for node in where.values()}) == 1


def test_roles_go_to_their_own_kinds_of_gpu_where_the_affinity_lets_them(
    cluster: Cluster, nodes, namespace: str
) -> None:
    nodes(gpu_node("large"), gpu_node("spare"), gpu_node("small", product=L40S))
    not_spare = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["spare"]}
    terms = [{"matchExpressions": [not_spare]}]
    affinity = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}}
    pods = build_pods(
        namespace,
        NodeTopology({H100: 8, L40S: 8}),
        {"role": "prefill", "replicas": 2, "gpu": "L40S"},
        {"role": "decode", "replicas": 2, "gpu": "H100"},
        template={"affinity": affinity},
    )
    where = placed(cluster, namespace, pods)
    assert {name: node for name, node in where.items() if "prefill" in name} == {
        "chat-prefill-0": "small",
        "chat-prefill-1": "small",
    }
    assert where["chat-decode-0"] == where["chat-decode-1"] == "large"
