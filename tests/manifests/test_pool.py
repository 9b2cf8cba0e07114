"""Pools from a placement, and the revision that binds their instances."""

from dataclasses import replace

import pytest

from cleave.api.engine import Connector, EngineSpec
from cleave.api.enums import FlippingMode
from cleave.api.plan import RolePool, SelectedPlan
from cleave.api.pool import Colocation, InstancePool
from cleave.api.role import Role
from cleave.controller.cluster.apply import hash_template
from cleave.controller.deployment.repurpose import are_compatible
from cleave.manifests.pool import build_selected_plan
from cleave.manifests.topology import NodeTopology
from cleave.planner.placement import Placement
from cleave.planner.resolved_deployment import resolve_in_cluster

from tests.support.built_pools import build_pools, choose_placement, hash_revision


def test_there_is_one_pool_per_role_named_after_it(deployment) -> None:
    chat = deployment()
    prefill, decode = build_pools(chat)
    assert (prefill.name, prefill.namespace, prefill.spec.role) == (
        "chat-prefill",
        "llm",
        Role.PREFILL,
    )
    assert decode.name == "chat-decode"
    assert decode.metadata.labels == {"cleave.dev/deployment": "chat", "cleave.dev/role": "decode"}


def test_pools_carry_counts_parallelism_and_the_deployments_settings(deployment) -> None:
    chat = deployment(
        placement={"manual": [{"role": "mixed", "replicas": 3, "parallelism": {"tensor": 2}}]},
        engine={"type": "Emulated"},
        template={"nodeSelector": {"a": "b"}},
    )
    (mixed,) = build_pools(chat)
    assert (mixed.spec.replicas, mixed.spec.parallelism.tensor) == (3, 2)
    assert mixed.spec.engine == chat.spec.engine.for_role(Role.MIXED)
    assert mixed.spec.template == chat.spec.template
    assert mixed.spec.model == chat.spec.model


def test_a_pool_survives_the_way_through_json(deployment) -> None:
    chat = deployment(placement={"manual": [{"role": "mixed"}]})
    (mixed,) = build_pools(chat)
    assert InstancePool.model_validate_json(mixed.model_dump_json()) == mixed


EAGER = {"args": ["--enforce-eager"], "env": [{"name": "A", "value": "own"}]}
PAIR = {"manual": [{"role": "prefill", "maxNumSeqs": 4}, {"role": "decode"}]}


def test_arguments_and_variables_of_a_role_follow_those_of_all(deployment) -> None:
    env = [{"name": "A", "value": "all"}, {"name": "B", "value": "all"}]
    engine = {"args": ["--seed", "1"], "env": env, "roles": {"prefill": EAGER}}
    chat = deployment(placement=PAIR, engine=engine)
    prefill, decode = (pool.spec.engine for pool in build_pools(chat))
    assert prefill.args == ["--max-num-seqs", "4", "--seed", "1", "--enforce-eager"]
    assert {each.name: each.value for each in prefill.env} == {"A": "own", "B": "all"}
    assert decode.args == ["--seed", "1"]
    assert {each.name: each.value for each in decode.env} == {"A": "all", "B": "all"}


def test_what_a_role_has_replaces_the_instances_of_that_role_only(deployment) -> None:
    before = deployment(placement=PAIR)
    after = deployment(placement=PAIR, engine={"roles": {"prefill": EAGER}})
    assert hash_revision(before) == hash_revision(after)
    old, new = (build_pools(each) for each in (before, after))
    assert hash_template(old[0]) != hash_template(new[0])
    assert hash_template(old[1]) == hash_template(new[1])
    # Neither the operator nor gateways give a running instance the other role.
    assert are_compatible(old[0], old[0])
    assert not are_compatible(new[0], new[1])
    assert (before.spec.flipping, after.spec.flipping) == (FlippingMode.AUTO, FlippingMode.OFF)


def test_members_of_a_cell_have_the_arguments_of_their_role(deployment) -> None:
    roles = {"decode": {"args": ["--enforce-eager"]}}
    engine = {"connector": "Nixl", "args": ["--seed", "1"], "roles": roles}
    chat = deployment(placement={"manual": CELL}, engine=engine)
    (pool,) = build_pools(chat, NODES)
    prefill, decode = pool.spec.members
    assert (prefill.args, decode.args) == (["--max-num-seqs", "8"], ["--enforce-eager"])
    assert pool.spec.engine.args == ["--seed", "1"]


def test_engines_with_variables_of_their_own_share_no_pod(deployment) -> None:
    engine = {"connector": "Nixl", "roles": {"decode": EAGER}}
    chat = deployment(placement={"manual": CELL}, engine=engine)
    assert len(build_pools(chat, NODES)) == 2


def test_engines_with_scheduling_know_every_roles_limits_and_can_follow_them(deployment) -> None:
    chat = deployment(
        placement={
            "manual": [
                {"role": "prefill", "maxNumBatchedTokens": 2048},
                {"role": "decode", "maxNumSeqs": 512, "maxNumBatchedTokens": 512},
            ]
        },
        engine={"scheduling": {"limits": [{"role": "mixed", "maxNumBatchedTokens": 1024}]}},
    )
    prefill, decode = (pool.spec.engine for pool in build_pools(chat))
    assert prefill.args == ["--max-num-batched-tokens", "2048"]
    assert decode.args == ["--max-num-seqs", "512", "--max-num-batched-tokens", "2048"]
    assert prefill.scheduling == decode.scheduling
    assert {
        each.role: (each.max_num_seqs, each.max_num_batched_tokens)
        for each in prefill.scheduling.limits
    } == {Role.PREFILL: (None, 2048), Role.DECODE: (512, 512), Role.MIXED: (None, 1024)}


def test_scheduling_is_part_of_the_revision(deployment) -> None:
    assert hash_revision(deployment(engine={"scheduling": {}})) != hash_revision(deployment())


def test_all_pools_of_a_deployment_share_one_revision(deployment) -> None:
    chat = deployment(
        placement={
            "manual": [
                {"role": "prefill", "parallelism": {"tensor": 4}},
                {"role": "decode", "parallelism": {"pipeline": 2}},
            ]
        }
    )
    assert len({pool.spec.revision for pool in build_pools(chat)}) == 1


def test_a_default_that_is_written_out_leaves_the_revision(deployment) -> None:
    spelled_out = deployment(model={"source": "org/model"}, engine={"type": "vLLM", "args": []})
    assert hash_revision(spelled_out) == hash_revision(deployment())


def test_the_revision_follows_cleaves_version_unless_an_image_is_given(
    deployment, monkeypatch
) -> None:
    declared = deployment(engine={"image": "registry.example/vllm:1"})
    before = hash_revision(deployment()), hash_revision(declared)
    monkeypatch.setattr("cleave.distribution.get_version", lambda: "99.0")
    assert hash_revision(deployment()) != before[0]
    assert hash_revision(declared) == before[1]


def test_the_revision_follows_the_connector_in_use(deployment, monkeypatch) -> None:
    pinned = deployment(engine={"image": "registry.example/vllm:1"})
    before = hash_revision(pinned)
    named = {"image": "registry.example/vllm:1", "connector": "Cleave"}
    assert hash_revision(deployment(engine=named)) == before
    assert hash_revision(deployment(engine={**named, "connector": "Nixl"})) != before
    # As in a version with another default.
    monkeypatch.setattr(EngineSpec, "kv_connector", Connector.NIXL)
    assert hash_revision(pinned) != before


@pytest.mark.parametrize(
    "spec",
    [
        {"model": "org/other"},
        {"model": {"source": "org/model", "revision": "v2"}},
        {"model": {"source": "org/model", "dtype": "float16"}},
        {"engine": {"type": "Emulated"}},
        {"engine": {"image": "registry.example/vllm:1"}},
        {"engine": {"args": ["--block-size", "32"]}},
        {"engine": {"env": [{"name": "A"}]}},
    ],
)
def test_incompatible_kv_makes_another_revision(deployment, spec) -> None:
    assert hash_revision(deployment(**spec)) != hash_revision(deployment())


@pytest.mark.parametrize(
    "spec",
    [
        {"slo": {"ttftMs": 1, "tpotMs": 1}},
        {"placement": {"manual": [{"role": "mixed", "replicas": 9, "parallelism": {"tensor": 2}}]}},
        {"routing": {"fallback": "Never"}},
        {"template": {"nodeSelector": {"a": "b"}}},
        {"template": {"affinity": {"nodeAffinity": {}}}},
        {"model": {"source": "org/model", "cache": {"hostPath": {"path": "/models"}}}},
    ],
)
def test_what_leaves_kv_alike_leaves_the_revision(deployment, spec) -> None:
    assert hash_revision(deployment(**spec)) == hash_revision(deployment())


def with_files(**cache: object) -> dict[str, object]:
    """A spec whose folder lies in this volume or image."""
    return {"model": {"source": "/models/m", "cache": cache}}


@pytest.mark.parametrize(
    "spec",
    [
        with_files(image={"reference": "registry.example/w:1"}),
        with_files(image={"reference": "registry.example/w:2"}),
        {"model": {"source": "org/m", "cache": {"image": {"reference": "registry.example/w:1"}}}},
        {"model": {"source": "org/m", "cache": {"image": {"reference": "registry.example/w:2"}}}},
        with_files(persistentVolumeClaim={"claimName": "weights-a"}),
        with_files(persistentVolumeClaim={"claimName": "weights-b"}),
        with_files(hostPath={"path": "/data/a"}),
        with_files(hostPath={"path": "/data/b"}),
        {"model": "/models/m"},
    ],
)
def test_the_volume_or_image_with_the_files_is_part_of_the_revision(deployment, spec) -> None:
    REVISIONS[str(spec)] = hash_revision(deployment(**spec))
    assert len({*REVISIONS.values()}) == len(REVISIONS)


REVISIONS: dict[str, str] = {}
"""Of the specs that were hashed, no two of which are equal."""


def test_how_a_volume_with_the_files_is_mounted_leaves_the_revision(deployment) -> None:
    claim = {"claimName": "weights-a"}
    mounts = (claim, {**claim, "readOnly": True})
    specs = [deployment(**with_files(persistentVolumeClaim=each)) for each in mounts]
    assert hash_revision(specs[0]) == hash_revision(specs[1])


def test_where_downloads_are_kept_leaves_the_revision(deployment) -> None:
    caches = ({"hostPath": {"path": "/a"}}, {"persistentVolumeClaim": {"claimName": "a"}})
    for cache in caches:
        spec = {"model": {"source": "org/model", "cache": cache}}
        assert hash_revision(deployment(**spec)) == hash_revision(deployment())


def test_engines_get_the_limits_that_the_plan_assumes(deployment) -> None:
    chat = deployment(
        placement={"manual": [{"role": "mixed", "maxNumSeqs": 64, "maxNumBatchedTokens": 512}]}
    )
    (mixed,) = build_pools(chat)
    assert mixed.spec.engine.args == ["--max-num-seqs", "64", "--max-num-batched-tokens", "512"]
    assert mixed.spec.revision == hash_revision(deployment())


@pytest.mark.parametrize("limits", ["--max-num-seqs=7", "--max_num_seqs=7"])
def test_limits_that_the_user_states_are_left_alone(deployment, limits) -> None:
    chat = deployment(
        placement={"manual": [{"role": "mixed", "maxNumSeqs": 64, "maxNumBatchedTokens": 512}]},
        engine={"args": [limits]},
    )
    (mixed,) = build_pools(chat)
    assert mixed.spec.engine.args == ["--max-num-batched-tokens", "512", limits]


def test_status_contains_plan_predictions_and_at_most_three_alternatives(
    deployment, answer
) -> None:
    placement = Placement(answer.selected.pools, answer.reason, answer)
    selected_plan = build_selected_plan(resolve_in_cluster(deployment()), placement)
    assert (selected_plan.verdict, selected_plan.gpus) == ("Disaggregate", answer.selected.gpus)
    assert selected_plan.predicted.goodput == answer.selected.prediction.goodput
    # 239.787...: four digits are written.
    assert selected_plan.predicted.ttft_ms.p90 == 239.8
    assert len(selected_plan.alternatives) == 3
    assert SelectedPlan.model_validate_json(selected_plan.model_dump_json()) == selected_plan


def test_a_placement_by_hand_predicts_nothing(deployment) -> None:
    chat = deployment(placement={"manual": [{"role": "mixed"}]})
    selected_plan = build_selected_plan(resolve_in_cluster(chat), choose_placement(chat))
    assert (selected_plan.verdict, selected_plan.predicted, selected_plan.alternatives) == (
        None,
        None,
        [],
    )
    assert selected_plan.reason == "set in spec.placement.manual"
    assert selected_plan.pools == [RolePool(role=Role.MIXED)]
    assert selected_plan.algorithm == ""


def test_the_placement_can_be_rebuilt_from_the_pools_in_status(deployment, answer) -> None:
    selected_plan = build_selected_plan(
        resolve_in_cluster(deployment()), Placement(answer.selected.pools, answer.reason, answer)
    )
    assert (selected_plan.algorithm, len(selected_plan.pools)) == (
        "Algorithm 2",
        len(answer.selected.pools),
    )
    manual_placement = [
        pool.model_dump(mode="json", exclude_none=True) for pool in selected_plan.pools
    ]
    again = choose_placement(deployment(placement={"manual": manual_placement}))
    assert [replace(pool, batching=None) for pool in answer.selected.pools] == list(again.pools)


def test_what_the_deployment_says_of_changes_reaches_its_pools(deployment) -> None:
    chat = deployment(rollout={"pendingTimeoutS": 30}, deletionPolicy="Immediate")
    for pool in build_pools(chat):
        assert pool.spec.pending_timeout_s == 30
        assert pool.spec.deletion_policy == "Immediate"
        assert pool.spec.owner == "Plan"


def test_cells_of_a_plan_reach_its_pools(deployment) -> None:
    manual = [
        {"role": "prefill", "replicas": 4, "perCell": 2},
        {"role": "decode", "replicas": 2, "perCell": 1},
        {"role": "mixed"},
    ]
    chat = deployment(placement={"manual": manual})
    prefill, decode, mixed = build_pools(chat, NodeTopology(domain="nvidia.com/gpu.clique"))
    assert prefill.spec.colocation == Colocation(per_cell=2, topology_key="nvidia.com/gpu.clique")
    assert decode.spec.colocation.per_cell == 1
    assert mixed.spec.colocation is None


def test_cells_that_fit_a_node_together_are_one_that_fills_it(deployment) -> None:
    manual = [
        {"role": "prefill", "replicas": 4, "perCell": 1},
        {"role": "decode", "replicas": 12, "perCell": 3},
        {"role": "mixed"},
    ]
    chat = deployment(placement={"manual": manual})
    prefill, decode, _ = build_pools(chat, NodeTopology({"NVIDIA-H100-80GB-HBM3": 8}))
    assert prefill.spec.colocation == Colocation(per_cell=2, exclusive=True)
    assert decode.spec.colocation == Colocation(per_cell=6, exclusive=True)
    emulated = deployment(placement={"manual": manual}, engine={"type": "Emulated"})
    first, *_ = build_pools(emulated, NodeTopology({"NVIDIA-H100-80GB-HBM3": 8}))
    assert first.spec.colocation == Colocation(per_cell=1)


CELL = [
    {"role": "prefill", "replicas": 4, "perCell": 2, "maxNumSeqs": 8},
    {"role": "decode", "replicas": 2, "perCell": 1, "parallelism": {"tensor": 2}},
]
NODES = NodeTopology({"NVIDIA-H100-80GB-HBM3": 8})


def test_cells_that_fit_a_node_are_the_instances_of_one_pool(deployment) -> None:
    chat = deployment(
        placement={"manual": CELL}, engine={"connector": "Nixl", "args": ["--enforce-eager"]}
    )
    (pool,) = build_pools(chat, NODES)
    assert (pool.name, pool.metadata.labels["cleave.dev/role"]) == ("chat-mixed", "mixed")
    assert (pool.spec.replicas, pool.spec.gpus, pool.spec.colocation) == (2, 4, None)
    prefill, decode = pool.spec.members
    assert (prefill.role, prefill.replicas, prefill.args) == ("prefill", 2, ["--max-num-seqs", "8"])
    assert (decode.role, decode.replicas, decode.parallelism.tensor) == ("decode", 1, 2)
    assert pool.spec.engine.args == ["--enforce-eager"]
    # The API server would accept it, too.
    InstancePool.model_validate_json(pool.model_dump_json(exclude_none=True))


@pytest.mark.parametrize(
    ("manual", "machines"),
    [
        (CELL, NodeTopology()),
        (CELL, NodeTopology({"NVIDIA-H100-80GB-HBM3": 2})),
        ([*CELL, {"role": "mixed"}], NODES),
        ([CELL[0] | {"gpu": "H100"}, CELL[1] | {"gpu": "A100-80GB"}], NODES),
        ([{key: each[key] for key in ("role", "replicas")} for each in CELL], NODES),
    ],
)
def test_other_cells_have_a_pod_for_each_instance(deployment, manual, machines) -> None:
    chat = deployment(placement={"manual": manual}, engine={"connector": "Nixl"})
    pools = build_pools(chat, machines)
    assert [pool.spec.role for pool in pools] == [each["role"] for each in manual]
    assert not any(pool.spec.members for pool in pools)


def test_a_cell_is_one_pod_only_where_its_engines_move_kv_from_gpu_to_gpu(deployment) -> None:
    claims = [{"name": "gpus", "resourceClaimName": "g"}]
    # An instance cannot be distributed over MIG devices.
    single = [CELL[0], CELL[1] | {"parallelism": {"tensor": 1}}]
    for spec in (
        {"template": {"gpuResource": "nvidia.com/mig-3g.40gb"}},
        {"template": {"gpuResource": "", "resourceClaims": claims}},
    ):
        chat = deployment(placement={"manual": single}, **spec)
        assert len(build_pools(chat, NODES)) == 2
    for connector in ("Cleave", "Nixl"):
        chat = deployment(placement={"manual": single}, engine={"connector": connector})
        assert len(build_pools(chat, NODES)) == 1
