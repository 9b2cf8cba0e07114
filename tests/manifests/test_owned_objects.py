"""What stands beside the pods: how agents are found, who may reach them, what drains may take."""

import pytest

from cleave.api.manifest import validate
from cleave.manifests.credentials import name_accounts
from cleave.manifests.gateway import build_gateway_deployment
from cleave.manifests.multi_node import build_node_pods
from cleave.manifests.owned_objects import (
    build_accounts,
    build_gateway_budget,
    build_pool_budget,
    build_workers_service,
)
from cleave.manifests.worker import build_worker_pod
from cleave.rpc.plan_thresholds import PlanThresholds

ACCOUNTS = name_accounts("llm", "chat", "u1")
DEPLOYMENT = validate(
    {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat", "namespace": "team"},
        "spec": {"model": "a/b", "slo": {"ttftMs": 1, "tpotMs": 1}},
    }
)


def test_the_headless_service_finds_workers_that_are_not_ready_too(deployment, pool) -> None:
    spec = build_workers_service(deployment())["spec"]
    assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", True)
    assert spec["selector"].items() <= build_worker_pod(pool(), 0)["metadata"]["labels"].items()


def test_its_port_is_the_agents(deployment, pool) -> None:
    port, *others = build_workers_service(deployment())["spec"]["ports"]
    (worker,) = build_worker_pod(pool(), 0)["spec"]["containers"]
    assert port["targetPort"] == worker["ports"][0]["name"]
    assert port["port"] == worker["ports"][0]["containerPort"] == 9000
    # Of the further agents of a cell in one pod.
    assert [(each["targetPort"], each["port"]) for each in others[:2]] == [
        ("agent-1", 9002),
        ("agent-2", 9004),
    ]


def test_its_labels_are_the_thresholds_of_the_plan_and_not_its_selector(deployment) -> None:
    plain = build_workers_service(deployment())
    labelled = build_workers_service(deployment(), PlanThresholds(256, 512))
    assert labelled["metadata"]["labels"] == {
        **plain["metadata"]["labels"],
        "cleave.dev/short-prompt-tokens": "256",
        "cleave.dev/overlap-min-tokens": "512",
    }
    assert labelled["spec"] == plain["spec"]


def test_pods_look_where_the_service_is(deployment, pool) -> None:
    meta = build_workers_service(deployment())["metadata"]
    (worker,) = build_worker_pod(pool(), 0)["spec"]["containers"]
    source = next(each["value"] for each in worker["env"] if each["name"] == "CLEAVE_AGENTS")
    assert source == f"endpoints:{meta['namespace']}/{meta['name']}:9000"


def test_followers_have_no_agent_and_are_not_found(deployment, pool) -> None:
    one = pool()
    spread = one.model_copy(update={"spec": one.spec.model_copy(update={"nodes": 2})})
    (follower,) = build_node_pods(spread, build_worker_pod(spread, "x"))
    selector = build_workers_service(deployment())["spec"]["selector"]
    assert not selector.items() <= follower["metadata"]["labels"].items()


def test_the_pods_accounts_may_find_agents_and_request_own_tokens_and_nothing_else(
    deployment,
) -> None:
    objects = build_accounts(deployment(), ACCOUNTS)
    accounts, roles, bindings = objects[::3], objects[1::3], objects[2::3]
    # One for each component: they may do different things at agents.
    assert [each["metadata"]["name"] for each in accounts] == [*ACCOUNTS.names]
    assert not any(each["automountServiceAccountToken"] for each in accounts)
    for name, role, binding in zip(ACCOUNTS.names, roles, bindings, strict=True):
        assert role["metadata"]["name"] == name
        find, request = role["rules"]
        assert (find["resources"], find["verbs"]) == (["endpointslices"], ["get", "list", "watch"])
        assert request == {
            "apiGroups": [""],
            "resources": ["serviceaccounts/token"],
            "resourceNames": [name],
            "verbs": ["create"],
        }
        api_group = "rbac.authorization.k8s.io"
        assert binding["roleRef"] == {"apiGroup": api_group, "kind": "Role", "name": name}
        (subject,) = binding["subjects"]
        assert (subject["name"], subject["namespace"]) == (name, "llm")
        assert {each["metadata"]["namespace"] for each in (role, binding)} == {"llm"}


def test_a_standalone_pool_gets_the_objects_of_a_deployment(deployment, pool) -> None:
    assert build_workers_service(pool()) == build_workers_service(deployment())
    assert build_accounts(pool(), ACCOUNTS) == build_accounts(deployment(), ACCOUNTS)


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
    assert budget["spec"]["selector"]["matchLabels"].items() <= pods.items()
    assert budget["metadata"]["name"] == "chat-gateway"
