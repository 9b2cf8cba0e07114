"""What makes agents findable, and the right to look for them."""

from cleave.manifests.discovery import (
    build_role_binding,
    build_service_account,
    build_workers_service,
)
from cleave.manifests.multi_node import build_node_pods
from cleave.manifests.worker import build_worker_pod


def test_the_headless_service_finds_workers_that_are_not_ready_too(deployment, pool) -> None:
    spec = build_workers_service(deployment())["spec"]
    assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", True)
    assert spec["selector"].items() <= build_worker_pod(pool(), 0)["metadata"]["labels"].items()


def test_its_port_is_the_agents(deployment, pool) -> None:
    (port,) = build_workers_service(deployment())["spec"]["ports"]
    (worker,) = build_worker_pod(pool(), 0)["spec"]["containers"]
    assert port["targetPort"] == worker["ports"][0]["name"]
    assert port["port"] == worker["ports"][0]["containerPort"] == 9000


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


def test_the_pods_account_may_do_what_the_cluster_role_says_and_nothing_else(
    deployment, pool
) -> None:
    account, binding = (
        build_service_account(deployment()),
        build_role_binding(deployment(), "discovery"),
    )
    assert build_worker_pod(pool(), 0)["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "discovery",
    }
    (subject,) = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == ("chat-discovery", "llm")
    assert binding["metadata"]["namespace"] == "llm"


def test_a_standalone_pool_gets_the_objects_of_a_deployment(deployment, pool) -> None:
    for build in (build_workers_service, build_service_account):
        assert build(pool()) == build(deployment())
    assert build_role_binding(pool(), "r") == build_role_binding(deployment(), "r")
