"""Which nodes workers must and had better run on."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cleave.manifests.scheduling import DRIVER_MAJOR, OLD_DRIVER_MAJOR, explain_unusable
from cleave.manifests.topology import CLIQUE, NodeTopology
from cleave.manifests.worker import build_worker_pod

from tests.support.node_terms import PREFERRED, REQUIRED, draw_affinities, is_selected

NEAR = [
    (100, "cleave.dev/infiniband-domain"),
    (60, "network.topology.nvidia.com/spine"),
    (20, "topology.kubernetes.io/zone"),
]


def cells(prefill: int = 1, decode: int = 2, pipeline: int = 1) -> dict:
    size = {"tensor": 2, "pipeline": pipeline}
    return {
        "manual": [
            {"role": "prefill", "replicas": prefill, "perCell": prefill, "parallelism": size},
            {"role": "decode", "replicas": decode, "perCell": decode, "parallelism": size},
        ]
    }


def spec(pool, **how):
    return build_worker_pod(pool, "x", **how)["spec"]


def preferred(spec):
    terms = spec["affinity"]["podAffinity"][PREFERRED]
    return [(term["weight"], term["podAffinityTerm"]["topologyKey"]) for term in terms]


def required(spec):
    (term,) = spec["affinity"]["podAffinity"][REQUIRED]
    return term["topologyKey"], term["labelSelector"]["matchLabels"]


def test_pods_go_only_where_the_template_says(pool) -> None:
    toleration = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
    template = {
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [toleration],
        "runtimeClassName": "nvidia",
    }
    found = spec(pool(template=template))
    assert found["nodeSelector"] == {"gpu": "h100"}
    assert found["tolerations"] == [toleration]
    assert found["runtimeClassName"] == "nvidia"


def test_without_a_template_pods_may_go_anywhere(pool) -> None:
    found = spec(pool())
    assert not {"nodeSelector", "tolerations", "runtimeClassName"} & found.keys()
    assert found["affinity"]["podAffinity"].keys() == {PREFERRED}


@pytest.mark.parametrize(
    ("gpu", "label"), [("A100-SXM-80GB", "NVIDIA-A100-SXM4-80GB"), ("our-own-gpu", "our-own-gpu")]
)
def test_a_kind_of_gpu_asks_for_nodes_with_its_label(pool, gpu, label) -> None:
    declared = pool(placement={"manual": [{"role": "decode", "gpu": gpu}]})
    assert spec(declared)["nodeSelector"] == {"nvidia.com/gpu.product": label}
    assert "nodeSelector" not in spec(declared, device="cpu")


def test_roles_may_be_on_different_gpus(deployment, pools_of) -> None:
    manual = [{"role": "prefill", "gpu": "H100"}, {"role": "decode", "gpu": "A100-80GB"}]
    prefill, decode = pools_of(deployment(placement={"manual": manual}))
    assert [spec(pool)["nodeSelector"]["nvidia.com/gpu.product"] for pool in (prefill, decode)] == [
        "NVIDIA-H100-80GB-HBM3",
        "NVIDIA-A100-SXM4-80GB",
    ]


def test_a_selector_by_hand_comes_before_the_kind_of_gpu(pool) -> None:
    declared = pool(
        placement={"manual": [{"role": "decode", "gpu": "H100"}]},
        template={"nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED"}},
    )
    assert spec(declared)["nodeSelector"] == {
        "nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3-SHARED"
    }


def test_emulated_engines_run_on_any_node(pool) -> None:
    declared = pool(
        placement={"manual": [{"role": "decode", "gpu": "H100"}]}, engine={"type": "Emulated"}
    )
    assert "nodeSelector" not in spec(declared)


def test_instances_that_may_be_anywhere_had_better_be_near_each_other(pool) -> None:
    # DistServe's Algorithm 1: KV travels between nodes, fastest within an InfiniBand domain.
    found = spec(pool())
    assert preferred(found) == NEAR
    terms = found["affinity"]["podAffinity"][PREFERRED]
    assert terms[0]["podAffinityTerm"]["labelSelector"]["matchLabels"] == {
        "cleave.dev/deployment": "chat",
        "cleave.dev/component": "worker",
    }


def test_a_role_is_not_all_on_one_node_where_there_are_others(pool) -> None:
    (constraint,) = spec(pool())["topologySpreadConstraints"]
    assert constraint["topologyKey"] == "kubernetes.io/hostname"
    assert constraint["whenUnsatisfiable"] == "ScheduleAnyway"
    assert constraint["labelSelector"]["matchLabels"] == {"cleave.dev/pool": "chat-decode"}


def test_mixed_instances_hand_nothing_over_and_need_not_be_near(deployment, pools_of) -> None:
    (mixed,) = pools_of(deployment(placement={"manual": [{"role": "mixed"}]}))
    assert spec(mixed)["affinity"].keys() == {"nodeAffinity"}


def test_both_phases_of_a_cell_must_share_a_node(deployment, pools_of) -> None:
    # DistServe's Algorithm 2.
    prefill, decode = pools_of(deployment(placement=cells()))
    first, second = spec(prefill, cell=0), spec(decode, cell=0)
    assert required(first) == required(second)
    assert required(first) == (
        "kubernetes.io/hostname",
        {"cleave.dev/deployment": "chat", "cleave.dev/segment": f"{prefill.spec.revision}-0"},
    )
    assert "topologySpreadConstraints" not in first


def test_a_cell_is_begun_where_no_other_is(deployment, pools_of) -> None:
    # Otherwise two cells that each fill a node could both begin on one.
    engine = {"connector": "Nixl"}
    prefill, decode = pools_of(deployment(placement=cells(), engine=engine))
    first, second = build_worker_pod(prefill, "x", cell=0), build_worker_pod(decode, "y", cell=1)
    (preference,) = first["spec"]["affinity"]["podAntiAffinity"][PREFERRED]
    term = preference["podAffinityTerm"]
    selector = term["labelSelector"]
    other = second["metadata"]["labels"]
    exists, not_in = selector["matchExpressions"]
    assert selector["matchLabels"].items() <= other.items()
    assert exists == {"key": "cleave.dev/segment", "operator": "Exists"}
    assert other[not_in["key"]] not in not_in["values"]
    assert first["metadata"]["labels"][not_in["key"]] in not_in["values"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert selector["matchLabels"]["cleave.dev/revision"] == prefill.spec.revision
    # With mixed instances beside them, cells are not single pods.
    beside = {"manual": [*cells()["manual"], {"role": "mixed"}]}
    topology = NodeTopology({"NVIDIA-H100-80GB-HBM3": 8})
    full, *_ = pools_of(deployment(placement=beside, engine=engine), topology)
    affinity = build_worker_pod(full, "x", cell=0)["spec"]["affinity"]
    assert affinity["podAntiAffinity"] == {REQUIRED: [term]}


def test_the_first_pod_of_a_cell_can_be_scheduled(deployment, pools_of) -> None:
    # Kubernetes lets a pod that asks for its own like be the first of them.
    prefill, _ = pools_of(deployment(placement=cells()))
    pod = build_worker_pod(prefill, "x", cell=3)
    _, term = required(pod["spec"])
    assert term.items() <= pod["metadata"]["labels"].items()
    assert pod["metadata"]["labels"]["cleave.dev/cell"] == "3"


def test_cells_do_not_attract_each_other_nor_those_of_another_revision(
    deployment, pools_of
) -> None:
    before, _ = pools_of(deployment(placement=cells()))
    after, _ = pools_of(deployment(placement=cells(), engine={"args": ["--seed", "1"]}))
    seen = [required(spec(pool, cell=cell))[1] for pool in (before, after) for cell in (0, 1)]
    assert len({each["cleave.dev/segment"] for each in seen}) == 4


def test_a_cell_may_fill_an_nvlink_clique_instead_of_a_node(deployment, pools_of) -> None:
    prefill, _ = pools_of(deployment(placement=cells()), NodeTopology({}, CLIQUE))
    assert required(spec(prefill, cell=0))[0] == "nvidia.com/gpu.clique"


@pytest.mark.parametrize(
    ("labels", "is_usable"),
    [
        ({}, True),
        ({"kubernetes.io/arch": "amd64", DRIVER_MAJOR: "580"}, True),
        ({DRIVER_MAJOR: "595", OLD_DRIVER_MAJOR: "595"}, True),
        ({OLD_DRIVER_MAJOR: "590"}, True),
        ({DRIVER_MAJOR: "570"}, False),
        ({OLD_DRIVER_MAJOR: "535"}, False),
        ({"kubernetes.io/arch": "arm64", DRIVER_MAJOR: "580"}, False),
    ],
)
def test_pods_with_cleaves_image_keep_to_nodes_that_can_run_it(pool, labels, is_usable) -> None:
    assert is_selected(spec(pool())["affinity"], labels) is is_usable
    assert (explain_unusable(labels) == "") is is_usable


@pytest.mark.parametrize(
    ("fields", "device"),
    [
        ({"engine": {"image": "own:1"}}, "gpu"),
        ({"engine": {"type": "Emulated"}}, "gpu"),
        ({}, "cpu"),
    ],
)
def test_other_images_have_requirements_of_their_own(pool, fields, device) -> None:
    assert "nodeAffinity" not in spec(pool(**fields), device=device).get("affinity", {})


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pods_go_where_cleaves_image_and_the_template_both_allow(pool, data) -> None:
    keys = ["rack", "kubernetes.io/arch", DRIVER_MAJOR, OLD_DRIVER_MAJOR]
    values = ["arm64", "570", "590"]
    affinity = data.draw(draw_affinities(st.sampled_from(keys), st.sampled_from(values)))
    drivers = dict.fromkeys(keys[2:], st.sampled_from(values[1:]))
    others = dict.fromkeys(keys[:2], st.sampled_from(values))
    labels = data.draw(st.fixed_dictionaries({}, optional={**others, **drivers}))
    found = spec(pool(template={"affinity": affinity}))["affinity"]
    allows = is_selected(affinity, labels)
    assert is_selected(found, labels) is (allows and explain_unusable(labels) == "")
    preferred_nodes = affinity.get("nodeAffinity", {}).get(PREFERRED)
    assert found["nodeAffinity"].get(PREFERRED) == preferred_nodes
    # Beside Cleave's own affinity between pods; and with a user's image.
    assert preferred({"affinity": found}) == NEAR
    own = spec(pool(template={"affinity": affinity}, engine={"image": "own:1"}))["affinity"]
    assert is_selected(own, labels) is allows
