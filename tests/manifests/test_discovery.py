"""What makes agents findable, and the right to look for them."""

from cleave.manifests.discovery import role_binding, service_account, workers_service
from cleave.manifests.multi_node import follower_pods
from cleave.manifests.worker import worker_pod


def test_the_headless_service_finds_workers_that_are_not_ready_too(deployment, pool) -> None:
    spec = workers_service(deployment())["spec"]
    assert (spec["clusterIP"], spec["publishNotReadyAddresses"]) == ("None", True)
    assert spec["selector"].items() <= worker_pod(pool(), 0)["metadata"]["labels"].items()


def test_its_port_is_the_agents(deployment, pool) -> None:
    (port,) = workers_service(deployment())["spec"]["ports"]
    (worker,) = worker_pod(pool(), 0)["spec"]["containers"]
    assert port["targetPort"] == worker["ports"][0]["name"]
    assert port["port"] == worker["ports"][0]["containerPort"] == 9000


def test_pods_look_where_the_service_is(deployment, pool) -> None:
    meta = workers_service(deployment())["metadata"]
    (worker,) = worker_pod(pool(), 0)["spec"]["containers"]
    source = next(each["value"] for each in worker["env"] if each["name"] == "CLEAVE_AGENTS")
    assert source == f"endpoints:{meta['namespace']}/{meta['name']}:9000"


def test_followers_have_no_agent_and_are_not_found(deployment, pool) -> None:
    one = pool()
    spread = one.model_copy(update={"spec": one.spec.model_copy(update={"nodes": 2})})
    (follower,) = follower_pods(spread, worker_pod(spread, "x"))
    selector = workers_service(deployment())["spec"]["selector"]
    assert not selector.items() <= follower["metadata"]["labels"].items()


def test_the_pods_account_may_do_what_the_cluster_role_says_and_nothing_else(
    deployment, pool
) -> None:
    account, binding = service_account(deployment()), role_binding(deployment(), "discovery")
    assert worker_pod(pool(), 0)["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert binding["roleRef"] == {
        "apiGroup": "rbac.authorization.k8s.io",
        "kind": "ClusterRole",
        "name": "discovery",
    }
    (subject,) = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == ("chat-discovery", "llm")
    assert binding["metadata"]["namespace"] == "llm"


def test_a_pool_by_hand_gets_what_its_deployment_would_have_made(deployment, pool) -> None:
    for made in (workers_service, service_account):
        assert made(pool()) == made(deployment())
    assert role_binding(pool(), "r") == role_binding(deployment(), "r")
