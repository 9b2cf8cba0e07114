"""A cell in one pod: one container for all its agents."""

import json
from itertools import pairwise

import pytest

from cleave.manifests.cell_pod import build_cell_pod, has_several_engines
from cleave.manifests.multi_node import build_node_pods, supports_leader_worker_set
from cleave.manifests.owned_objects import build_workers_service
from cleave.manifests.resources import count_pod_gpus
from cleave.manifests.topology import NodeTopology

H100 = "NVIDIA-H100-80GB-HBM3"
MANUAL = [
    {"role": "prefill", "replicas": 2, "perCell": 2, "gpu": "H100", "maxNumSeqs": 8},
    {"role": "decode", "replicas": 1, "perCell": 1, "gpu": "H100", "parallelism": {"tensor": 2}},
]


@pytest.fixture
def container(deployment, pools_of):
    chat = deployment(
        placement={"manual": MANUAL}, engine={"connector": "Nixl", "args": ["--seed", "1"]}
    )
    (pool,) = pools_of(chat, NodeTopology({H100: 8}))
    pod = build_cell_pod(pool, "chat-mixed-x")
    assert pod["metadata"]["labels"]["cleave.dev/role"] == "mixed"
    assert pod["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": H100}
    (found,) = pod["spec"]["containers"]
    return found


def read_agents(container) -> list[dict[str, str]]:
    flags = []
    for text in container["command"][7:]:
        own, _, engine = json.dumps(json.loads(text)).partition(', "--", ')
        names = json.loads(f"{own.rstrip(']')}]")
        flags.append({**dict(zip(names[::2], names[1::2], strict=True)), "engine": engine})
    return flags


def test_its_container_has_what_all_its_engines_need(container, deployment, pools_of) -> None:
    limits = container["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "4"
    # The template is that of one engine; each opens the same RDMA cards and reads the same weights.
    disk = {"ephemeral-storage": "40Gi"}
    own = {"resources": {"limits": {"memory": "20Gi", "cpu": "1500m", "rdma/hca": 1, **disk}}}
    chat = deployment(placement={"manual": MANUAL}, template=own, engine={"connector": "Nixl"})
    (pool,) = pools_of(chat, NodeTopology({H100: 8}))
    (found,) = build_cell_pod(pool, "x")["spec"]["containers"]
    assert found["resources"]["limits"] == {
        "nvidia.com/gpu": "4",
        "memory": "60Gi",
        "cpu": "4500m",
        "rdma/hca": "1",
        **disk,
    }


def test_its_empty_directories_have_room_for_all_its_engines(deployment, pools_of) -> None:
    chat = deployment(placement={"manual": MANUAL}, engine={"connector": "Nixl"})
    (pool,) = pools_of(chat, NodeTopology({H100: 8}))
    volumes = build_cell_pod(pool, "x")["spec"]["volumes"]
    sizes = {each["name"]: each["emptyDir"].get("sizeLimit") for each in volumes}
    # Four GPUs; the size of the model is not known.
    assert sizes == {"tmp": "30Gi", "shm": "32Gi", "home": None}


def test_its_agents_have_names_roles_ports_and_a_cell_of_their_own(container) -> None:
    assert container["command"][:7] == [
        *("python", "-m", "cleave_worker.agent.cell"),
        *("--host", "$(POD_IP)", "--port", "8999"),
    ]
    agents = read_agents(container)
    assert [(each["--name"], each["--role"], each["--port"]) for each in agents] == [
        ("chat-mixed-x.prefill-0", "prefill", "9000"),
        ("chat-mixed-x.prefill-1", "prefill", "9002"),
        ("chat-mixed-x.decode-0", "decode", "9004"),
    ]
    assert [each["--engine-port"] for each in agents] == ["9001", "9003", "9005"]
    assert {each["--cell"] for each in agents} == {"chat-mixed-x"}
    assert [each["--tensor-parallel-size"] for each in agents] == ["1", "1", "2"]
    assert '"--seed", "1", "--max-num-seqs", "8"' in agents[0]["engine"]
    assert "--max-num-seqs" not in agents[2]["engine"]


def test_its_ports_are_those_of_the_workers_service(container, deployment) -> None:
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {
        "agent": 9000,
        "engine": 9001,
        "agent-1": 9002,
        "engine-1": 9003,
        "agent-2": 9004,
        "engine-2": 9005,
    }
    service = {each["name"]: each["port"] for each in
               build_workers_service(deployment())["spec"]["ports"]}  # fmt: skip
    assert all(service[name] == port for name, port in ports.items() if name.startswith("agent"))


def test_it_is_probed_as_a_whole(container) -> None:
    assert container["readinessProbe"]["grpc"] == {"port": 8999, "service": "ready"}
    assert container["livenessProbe"]["grpc"] == {"port": 8999}


RANKS = {"role": "decode", "replicas": 2, "gpu": "H100"}
SIZE = {"tensor": 2, "data": 2, "expert": True}


@pytest.fixture
def rank_pod(deployment, pools_of):
    """The first instance of a pool with two data-parallel ranks."""
    chat = deployment(
        placement={"manual": [{"role": "prefill"}, RANKS | {"parallelism": SIZE}]},
        engine={"args": ["--seed", "1"]},
    )
    _, pool = pools_of(chat, NodeTopology({H100: 8}))
    assert pool.spec.gpus == 4
    assert has_several_engines(pool.spec)
    return build_cell_pod(pool, 0)


def test_data_parallel_ranks_are_engines_of_one_pod(rank_pod) -> None:
    assert rank_pod["metadata"]["name"] == "chat-decode-0"
    assert rank_pod["metadata"]["labels"]["cleave.dev/role"] == "decode"
    (container,) = rank_pod["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert container["readinessProbe"]["grpc"] == {"port": 8999, "service": "ready"}
    agents = [json.loads(text) for text in container["command"][7:]]
    for rank, agent in enumerate(agents):
        options = dict(pairwise(agent))
        assert options["--name"] == f"chat-decode-0.rank-{rank}"
        assert options["--role"] == "$(CLEAVE_ROLE)"
        assert options["--port"] == str(9000 + 2 * rank)
        assert options["--tensor-parallel-size"] == "2"
        assert options["--data-parallel-size"] == "2"
        assert options["--data-parallel-rank"] == str(rank)
        assert "--expert-parallel" in agent
        assert agent[-3:] == ["--", "--seed", "1"]
    assert len(agents) == 2


@pytest.fixture
def wide_pool(deployment, pools_of):
    """A pool whose instances have eight data-parallel ranks of two GPUs, on two nodes."""
    size = {"parallelism": SIZE | {"data": 8}, "gpu": H100}
    chat = deployment(placement={"manual": [{"role": "mixed", **size}]})
    (pool,) = pools_of(chat, NodeTopology({H100: 8}))
    assert pool.spec.nodes == 2
    return pool


def test_data_parallel_ranks_of_two_nodes_join_the_launcher_of_the_first(wide_pool) -> None:
    leader = build_cell_pod(wide_pool, "x")
    leader["metadata"]["uid"] = "u1"
    (further,) = build_node_pods(wide_pool, leader)
    names = []
    for pod, more in ((leader, []), (further, ["--leader", "$(CLEAVE_LEADER):8999"])):
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        command = container["command"]
        assert command[7 : 7 + len(more)] == more
        agents = [dict(pairwise(json.loads(text))) for text in command[7 + len(more) :]]
        assert [each["--port"] for each in agents] == ["9000", "9002", "9004", "9006"]
        assert {each["--data-parallel-size"] for each in agents} == {"8"}
        assert not any("--nnodes" in text for text in command), "each rank is on one node"
        names += [each["--name"] for each in agents]
    assert names == [f"x.rank-{number}" for number in range(8)]


def test_a_further_pod_of_data_parallel_ranks_is_discovered_and_belongs_to_the_first(
    wide_pool,
) -> None:
    leader = build_cell_pod(wide_pool, "x")
    leader["metadata"]["uid"] = "u1"
    (further,) = build_node_pods(wide_pool, leader)
    assert (leader["spec"]["hostname"], leader["spec"]["subdomain"]) == ("x", "chat-workers")
    assert "hostname" not in further["spec"]
    meta = further["metadata"]
    own = {"cleave.dev/node-rank": "1"}
    assert (meta["name"], meta["labels"]) == ("x-1", leader["metadata"]["labels"] | own)
    assert meta["ownerReferences"][0]["uid"] == "u1"
    assert further["spec"]["restartPolicy"] == "Always"
    (container,) = further["spec"]["containers"]
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert env["CLEAVE_LEADER"] == "x.chat-workers.llm.svc"


def test_a_set_cannot_number_data_parallel_ranks(wide_pool) -> None:
    assert not supports_leader_worker_set(wide_pool)


def test_data_parallel_ranks_have_the_claims_of_their_pod(deployment, pools_of) -> None:
    claims = {"gpuResource": "", "resourceClaims": [{"name": "gpus", "resourceClaimName": "four"}]}
    pools = [{"role": "mixed", "parallelism": SIZE}]
    (pool,) = pools_of(deployment(placement={"manual": pools}, template=claims))
    (container,) = build_cell_pod(pool, "x")["spec"]["containers"]
    assert container["resources"]["claims"] == [{"name": "gpus"}]


def test_other_instances_have_one_engine(deployment, pools_of) -> None:
    for pool in pools_of(deployment()):
        assert not has_several_engines(pool.spec)


@pytest.mark.parametrize("template", [{}, {"resources": {"limits": {"nvidia.com/gpu": 2}}}])
def test_the_gpus_of_a_pod_are_those_that_plans_count(deployment, pools_of, template) -> None:
    ranks = [{"role": "mixed", "replicas": 1, "parallelism": SIZE | {"data": 4}}]
    cell = {"placement": {"manual": MANUAL}, "engine": {"connector": "Nixl"}}
    for spec in ({"placement": {"manual": ranks}}, cell):
        (pool,) = pools_of(deployment(**spec, template=template), NodeTopology({H100: 8}))
        (found,) = build_cell_pod(pool, "x")["spec"]["containers"]
        counted = count_pod_gpus(pool.spec, "gpu")
        assert found["resources"]["limits"]["nvidia.com/gpu"] == str(counted)
