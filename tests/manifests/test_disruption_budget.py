"""How many pods whoever drains nodes may take at a time."""

import pytest

from cleave.manifests.disruption_budget import build_gateway_budget, build_pool_budget
from cleave.manifests.gateway import build_gateway_deployment
from cleave.manifests.multi_node import build_node_pods
from cleave.manifests.worker import build_worker_pod


def spread(pool, replicas: int, nodes: int):
    update = {"replicas": replicas, "nodes": nodes}
    return pool.model_copy(update={"spec": pool.spec.model_copy(update=update)})


@pytest.mark.parametrize(("replicas", "min_available"), [(0, 0), (1, 0), (2, 1), (5, 4)])
def test_one_instance_at_a_time(pool, replicas, min_available) -> None:
    budget = build_pool_budget(spread(pool(), replicas, nodes=1))
    assert budget["spec"]["minAvailable"] == min_available
    # Kubernetes would have to ask the pool's /scale.
    assert "maxUnavailable" not in budget["spec"]
    assert budget["metadata"]["name"] == "chat-decode"


@pytest.mark.parametrize(("replicas", "min_available"), [(0, 0), (1, 0), (2, 3), (5, 12)])
def test_pods_of_an_instance_over_nodes_count_one_by_one(pool, replicas, min_available) -> None:
    assert (
        build_pool_budget(spread(pool(), replicas, nodes=3))["spec"]["minAvailable"]
        == min_available
    )


def test_it_speaks_of_all_pods_of_the_pool_and_of_no_other(pool) -> None:
    one = spread(pool(), 1, nodes=2)
    leader = build_worker_pod(one, "x")
    selector = build_pool_budget(one)["spec"]["selector"]["matchLabels"]
    for pod in (leader, *build_node_pods(one, leader)):
        assert selector.items() <= pod["metadata"]["labels"].items()
    assert selector["cleave.dev/pool"] == "chat-decode"


def test_a_pod_that_is_not_ready_never_blocks_a_node(pool) -> None:
    assert build_pool_budget(pool())["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_gateways_go_one_at_a_time(deployment) -> None:
    budget = build_gateway_budget(deployment())
    pods = build_gateway_deployment(deployment())["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"]["matchLabels"] == pods
    assert budget["metadata"]["name"] == "chat-gateway"
