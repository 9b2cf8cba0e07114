"""Instances that are spread over nodes."""

import pytest

from cleave.manifests.multi_node import (
    build_leader_worker_set,
    build_node_pods,
    supports_leader_worker_set,
)
from cleave.manifests.topology import CLIQUE, NodeTopology
from cleave.manifests.worker import build_worker_pod

H100 = "NVIDIA-H100-80GB-HBM3"


def option(line: list[str], name: str) -> str:
    return line[line.index(name) + 1]


def container(spec):
    (only,) = spec["containers"]
    return only


@pytest.fixture
def spread_pool(deployment, pools_of):
    """A decode pool whose instances take two nodes: of 8 H100, of 4 in cells."""

    def make(domain: str = "kubernetes.io/hostname", cells: bool = False, **spec):
        size = {"tensor": 4, "pipeline": 2} if cells else {"tensor": 8, "pipeline": 2}
        cell = {"perCell": 1} if cells else {}
        manual = [
            {"role": role, "gpu": H100, "parallelism": size, **cell}
            for role in ("prefill", "decode")
        ]
        chat = deployment(placement={"manual": manual}, **spec)
        return pools_of(chat, NodeTopology({H100: 8}, domain))[1]

    return make


def test_a_leader_and_its_followers_share_the_gpus(spread_pool) -> None:
    pool = spread_pool()
    leader = build_worker_pod(pool, "x")
    pods = [leader, *build_node_pods(pool, leader)]
    assert [pod["metadata"]["name"] for pod in pods] == ["x", "x-1"]
    limits = [container(pod["spec"])["resources"]["limits"] for pod in pods]
    assert [each["nvidia.com/gpu"] for each in limits] == ["8", "8"]


def test_ranks_meet_at_the_leader(spread_pool) -> None:
    own = {"connector": "Cleave", "transfer": "PerChunk"}
    pool = spread_pool(engine={"args": ["--seed", "1"], **own})
    leader = build_worker_pod(pool, "x")
    (follower,) = build_node_pods(pool, leader)
    lines = [container(pod["spec"])["command"] for pod in (leader, follower)]
    shares = [line[line.index("--") + 1 :] for line in lines]
    assert shares == [
        ["--nnodes", "2", "--node-rank", "0", "--master-addr", "$(POD_IP)", "--seed", "1"],
        ["--nnodes", "2", "--node-rank", "1", "--master-addr", "$(CLEAVE_LEADER)", "--seed", "1"],
    ]
    sizes = ("--tensor-parallel-size", "--pipeline-parallel-size")
    for name in ("--model", *sizes, "--connector", "--transfer"):
        assert option(lines[0], name) == option(lines[1], name)


def test_followers_find_their_leader_by_name(spread_pool) -> None:
    pool = spread_pool()
    leader = build_worker_pod(pool, "x")
    (follower,) = build_node_pods(pool, leader)
    worker = container(follower["spec"])
    assert worker["env"][0] == {"name": "CLEAVE_LEADER", "value": "x.chat-workers.llm.svc"}
    assert (leader["spec"]["hostname"], leader["spec"]["subdomain"]) == ("x", "chat-workers")
    assert option(worker["command"], "--leader") == "$(CLEAVE_LEADER):9000"


def test_a_follower_is_not_selected_as_an_instance(spread_pool) -> None:
    pool = spread_pool()
    (follower,) = build_node_pods(pool, build_worker_pod(pool, "x"))
    labels = follower["metadata"]["labels"]
    assert labels["cleave.dev/component"] == "follower"
    assert labels["cleave.dev/instance"] == "x"
    assert "readinessProbe" not in container(follower["spec"])


def test_followers_go_when_their_leader_goes(spread_pool) -> None:
    pool = spread_pool()
    leader = build_worker_pod(pool, "x")
    assert "ownerReferences" not in build_node_pods(pool, leader)[0]["metadata"]
    leader["metadata"]["uid"] = "u-1"
    assert build_node_pods(pool, leader)[0]["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "u-1"}
    ]


def test_pods_of_one_instance_had_better_share_a_clique(spread_pool) -> None:
    pool = spread_pool()
    leader = build_worker_pod(pool, "x")
    for pod in (leader, *build_node_pods(pool, leader)):
        terms = pod["spec"]["affinity"]["podAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        nearest = terms[0]["podAffinityTerm"]
        assert nearest["topologyKey"] == CLIQUE
        assert nearest["labelSelector"]["matchLabels"] == {"cleave.dev/instance": "x"}


def test_equal_stages_of_a_cell_share_a_node_and_others_need_not(spread_pool) -> None:
    pool = spread_pool(cells=True)
    leader = build_worker_pod(pool, "x", cell=4)
    (follower,) = build_node_pods(pool, leader)
    segments = [pod["metadata"]["labels"]["cleave.dev/segment"] for pod in (leader, follower)]
    stamp = pool.spec.revision
    assert segments == [f"{stamp}-4-0", f"{stamp}-4-1"]


def test_within_a_clique_the_whole_cell_is_one(spread_pool) -> None:
    pool = spread_pool(CLIQUE, cells=True)
    pool = pool.model_copy(update={"spec": pool.spec.model_copy(update={"nodes": 2})})
    leader = build_worker_pod(pool, "x", cell=4)
    (follower,) = build_node_pods(pool, leader)
    segments = {pod["metadata"]["labels"]["cleave.dev/segment"] for pod in (leader, follower)}
    assert segments == {f"{pool.spec.revision}-4"}


def test_an_instance_on_one_node_has_no_followers_and_no_ranks(pool) -> None:
    alone = build_worker_pod(pool(), "x")
    assert build_node_pods(pool(), alone) == []
    assert "--nnodes" not in container(alone["spec"])["command"]
    assert "hostname" not in alone["spec"]


def test_emulated_engines_are_never_spread(spread_pool) -> None:
    assert spread_pool(engine={"type": "Emulated"}).spec.nodes == 1


def test_a_leader_worker_set_is_one_instance_that_is_replaced_as_a_whole(spread_pool) -> None:
    leader_worker_set = build_leader_worker_set(spread_pool(), "x")
    spec, group = leader_worker_set["spec"], leader_worker_set["spec"]["leaderWorkerTemplate"]
    assert (leader_worker_set["metadata"]["name"], spec["replicas"], group["size"]) == ("x", 1, 2)
    assert group["restartPolicy"] == "RecreateGroupOnPodRestart"


def test_a_leader_worker_set_has_the_pods_that_there_would_be_without(spread_pool) -> None:
    pool = spread_pool()
    leader = build_worker_pod(pool, "x-0")
    (follower,) = build_node_pods(pool, leader)
    group = build_leader_worker_set(pool, "x")["spec"]["leaderWorkerTemplate"]
    own = {"hostname", "subdomain"}
    first, second = group["leaderTemplate"], group["workerTemplate"]
    assert first["spec"] == {k: v for k, v in leader["spec"].items() if k not in own}
    assert first["metadata"]["labels"] == leader["metadata"]["labels"]
    assert second["metadata"]["labels"] == follower["metadata"]["labels"]
    worker = container(second["spec"])
    assert worker["env"][0] == {"name": "CLEAVE_LEADER", "value": "$(LWS_LEADER_ADDRESS)"}
    assert option(worker["command"], "--node-rank") == "$(LWS_WORKER_INDEX)"
    assert worker["resources"] == container(follower["spec"])["resources"]


def test_a_set_cannot_place_its_followers_in_different_cells(spread_pool, pool) -> None:
    assert supports_leader_worker_set(spread_pool())
    assert supports_leader_worker_set(spread_pool(CLIQUE, cells=True))
    assert not supports_leader_worker_set(spread_pool(cells=True))


@pytest.mark.parametrize("as_set", [False, True])
def test_every_pod_of_an_instance_has_the_templates_fields(pool, as_set) -> None:
    size = {"tensor": 8, "pipeline": 2}
    template = {"labels": {"team": "a"}, "annotations": {"network": "roce"}, "hostNetwork": True}
    given = pool(placement={"manual": [{"role": "decode", "parallelism": size}]}, template=template)
    two = given.model_copy(update={"spec": given.spec.model_copy(update={"nodes": 2})})
    if as_set:
        group = build_leader_worker_set(two, "x")["spec"]["leaderWorkerTemplate"]
        pods = [group["leaderTemplate"], group["workerTemplate"]]
    else:
        leader = build_worker_pod(two, "x")
        pods = [leader, *build_node_pods(two, leader)]
    assert len(pods) == 2
    for each in pods:
        assert each["metadata"]["labels"]["team"] == "a"
        assert each["metadata"]["annotations"] == {"network": "roce"}
        assert each["spec"]["hostNetwork"] is True
