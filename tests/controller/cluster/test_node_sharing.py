"""Nodes of other work beside those of a plan: plans hold, and name each of them."""

import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.api.cluster import Cluster
from cleave.api.pods.worker_template import WorkerTemplate
from cleave.controller.cluster.inventory import Inventory, build_inventory, list_lost
from cleave.controller.cluster.objects import parse_node
from cleave.manifests.labels import Manifest
from cleave.perf.hardware.inventory import list_gpus

from tests.support.node_terms import REQUIRED, draw_affinities, is_selected

PRODUCT, REPLICAS = "nvidia.com/gpu.product", "nvidia.com/gpu.replicas"
KNOWN = [
    "NVIDIA-A100-SXM4-40GB",
    "NVIDIA-A100-SXM4-80GB",
    "NVIDIA-A100-80GB-PCIe",
    "NVIDIA-A100-PCIE-40GB",
    "NVIDIA-A800-SXM4-80GB",
    "NVIDIA-A800-80GB-PCIe",
    "NVIDIA-H100-80GB-HBM3",
    "NVIDIA-H100-PCIe",
    "NVIDIA-H100-NVL",
    "NVIDIA-H200",
    "NVIDIA-H200-NVL",
    "NVIDIA-H800",
    "NVIDIA-H20",
    "NVIDIA-B200",
    "NVIDIA-B300-SXM6-AC",
    "NVIDIA-GB200",
    "NVIDIA-GB300",
    "NVIDIA-GH200-480GB",
    "NVIDIA-L40S",
    "NVIDIA-L40",
    "NVIDIA-L20",
    "NVIDIA-L4",
    "NVIDIA-A10G",
    "NVIDIA-A10",
    "NVIDIA-A30",
    "NVIDIA-A40",
    "NVIDIA-RTX-A6000",
    "NVIDIA-RTX-6000-Ada-Generation",
    "NVIDIA-GeForce-RTX-3090",
    "NVIDIA-GeForce-RTX-4090",
    "NVIDIA-GeForce-RTX-5090",
    "NVIDIA-GB10",
    "Tesla-T4",
    "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition",
    "NVIDIA-RTX-PRO-6000-Blackwell-Workstation-Edition",
    "NVIDIA-RTX-PRO-6000-Blackwell-Max-Q-Workstation-Edition",
    "Tesla-V100-SXM2-16GB",
    "Tesla-V100-SXM2-32GB",
    "Tesla-V100-PCIE-16GB",
    "Tesla-V100-PCIE-32GB",
]
PARTS = [
    "Tesla-T4-SHARED",
    "NVIDIA-L4-SHARED",
    "NVIDIA-A100-SXM4-80GB-SHARED",
    "NVIDIA-H100-80GB-HBM3-SHARED",
    "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb",
    "NVIDIA-A100-SXM4-80GB-MIG-3g.40gb",
    "NVIDIA-H100-80GB-HBM3-MIG-1g.10gb",
    "NVIDIA-A100-SXM4-40GB-MIG-INVALID",
    "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb-SHARED",
]
UNKNOWN = [
    "NVIDIA-NEW-X1",
    "NVIDIA-GeForce-RTX-3060",
    "Tesla-P100-PCIE-16GB",
]


def read(name: str, product: str = "", gpus: int = 8, taints=(), **labels: str) -> Manifest:
    shown = {**({PRODUCT: product} if product else {}), **labels}
    return {
        "metadata": {"name": name, "labels": shown},
        "spec": {"taints": list(taints)},
        "status": {
            "allocatable": {"nvidia.com/gpu": str(gpus)},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


HOSTS = [read(name, "NVIDIA-H100-80GB-HBM3") for name in ("h1", "h2")]
ALONE = build_inventory(map(parse_node, HOSTS), template=WorkerTemplate())


def beside(*nodes: Manifest, settings: Cluster | None = None, **template) -> Inventory:
    """The inventory of two known nodes and these."""
    chosen = WorkerTemplate.model_validate(template)
    parsed = [parse_node(each) for each in (*nodes, *HOSTS)]
    return build_inventory(parsed, settings, template=chosen)


def count(found: Inventory) -> dict[str, int]:
    groups = found.cluster.nodes if found.cluster else []
    return {each.gpu: each.count * each.gpus_per_node for each in groups}


def check_left_out(found: Inventory, *why: str) -> None:
    """The plans of the known nodes hold, and a sentence names the other one with the reason."""
    assert found.node_kinds_hash == ALONE.node_kinds_hash
    assert found.cluster == ALONE.cluster
    assert "left out of plans: x: " in found.unusable
    assert all(each in found.unusable for each in why)


@pytest.mark.parametrize("product", KNOWN)
def test_gpus_of_fleets_are_known(product: str) -> None:
    found = beside(read("x", product))
    assert count(found)[product] >= 8
    assert found.unusable == ""


@pytest.mark.parametrize("product", PARTS + UNKNOWN)
def test_no_spelling_of_other_gpus_stops_plans(product: str) -> None:
    found = beside(read("x", product))
    check_left_out(found, product, "part" if "MIG" in product else "")
    assert found.topology.gpus_per_node[product] == 8, "a manual placement may name it"


@pytest.mark.parametrize(
    "labels",
    [
        {REPLICAS: "4", "nvidia.com/gpu.count": "2"},
        {"nvidia.com/gpu.sharing-strategy": "mps"},
        {"nvidia.com/gpu.sharing-strategy": "time-slicing", REPLICAS: "2"},
        {"nvidia.com/gpu.count": "2"},
        {"nvidia.com/mig.config": "all-1g.10gb", "nvidia.com/mig.strategy": "single"},
        {"nvidia.com/mig.config": "custom", "nvidia.com/mig.strategy": "mixed"},
        {"cloud.google.com/gke-gpu-sharing-strategy": "time-sharing"},
        {"cloud.google.com/gke-gpu-partition-size": "1g.5gb"},
    ],
)
def test_gpus_that_labels_call_shared_or_divided_are_left_out(labels: dict[str, str]) -> None:
    check_left_out(beside(read("x", "NVIDIA-A100-SXM4-80GB", **labels)), " its GPUs ")


@pytest.mark.parametrize(
    "labels",
    [
        {REPLICAS: "1", "nvidia.com/gpu.count": "8", "nvidia.com/gpu.sharing-strategy": "none"},
        {"nvidia.com/mig.config": "all-disabled", "nvidia.com/mig.capable": "true"},
        {REPLICAS: "", "nvidia.com/gpu.count": "many"},
    ],
)
def test_whole_gpus_count(labels: dict[str, str]) -> None:
    assert count(beside(read("x", "NVIDIA-L40S", **labels)))["NVIDIA-L40S"] == 8


def test_a_node_without_the_label_is_named() -> None:
    check_left_out(beside(read("x")), f"has no label {PRODUCT}")


@pytest.mark.parametrize(
    "resource",
    [
        "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe", "habana.ai/gaudi",
        "google.com/tpu", "aws.amazon.com/neuron", "huawei.com/Ascend910", "cambricon.com/vmlu",
        "hygon.com/dcunum", "metax-tech.com/sgpu", "kunlunxin.com/xpu", "qualcomm.com/qaic",
        "volcano.sh/vgpu-number", "nvidia.com/mig-3g.40gb", "nvidia.com/gpu.shared",
        "rebellions.ai/npu",
    ],
)  # fmt: skip
def test_a_node_with_other_accelerators_is_named(resource: str) -> None:
    node = read("x", gpus=0)
    node["status"]["allocatable"] |= {"cpu": "96", "memory": "1Ti", resource: "8"}
    found = beside(node)
    check_left_out(found, f"offers {resource}, and plans count nvidia.com/gpu")
    assert found.topology == ALONE.topology


def test_a_node_whose_device_plug_in_offers_no_gpu_is_named_and_one_for_other_work_is_not() -> None:
    check_left_out(beside(read("x", "NVIDIA-L40S", gpus=0)), "has NVIDIA-L40S by its label")
    node = read("x", gpus=0)
    others = (
        "ephemeral-storage",
        "hugepages-2Mi",
        "rdma/hca",
        "devices.kubevirt.io/kvm",
        "a.io/input",
    )
    node["status"]["allocatable"] |= dict.fromkeys(("cpu", *others), "8") | {"amd.com/gpu": "0"}
    assert beside(node) == ALONE


def test_where_only_other_accelerators_are_they_are_named() -> None:
    node = read("x", gpus=0)
    node["status"]["allocatable"]["amd.com/gpu"] = "8"
    found = build_inventory([parse_node(node)])
    assert found.cluster is None
    assert found.unusable.startswith("left out of plans: x: offers amd.com/gpu")


def test_a_described_part_is_planned_with() -> None:
    part = {"name": "NVIDIA-L4-SHARED", "memoryGib": 11, "memoryGbps": 150, "denseTflops": 60}
    settings = Cluster.model_validate({"nodes": [{"gpu": "H100"}], "gpus": [part]})
    found = beside(read("x", "NVIDIA-L4-SHARED", **{REPLICAS: "2"}), settings=settings)
    assert count(found)["NVIDIA-L4-SHARED"] == 8
    assert found.cluster is not None
    assert "NVIDIA-L4-SHARED" in list_gpus(found.cluster)


def test_gpus_on_which_cleaves_image_does_not_run_are_left_out_of_plans_with_it() -> None:
    nodes = [parse_node(each) for each in (read("x", "Tesla-V100-PCIE-32GB"), *HOSTS)]
    assert count(build_inventory(nodes))["Tesla-V100-PCIE-32GB"] == 8
    check_left_out(build_inventory(nodes, needs_own_image=True), "compute capability 7.0")


DEDICATED = {"key": "dedicated", "value": "team-b", "effect": "NoSchedule"}


@pytest.mark.parametrize(
    ("taint", "tolerations", "counts"),
    [
        (DEDICATED, [], False),
        ({**DEDICATED, "effect": "NoExecute"}, [], False),
        ({**DEDICATED, "effect": "PreferNoSchedule"}, [], True),
        (DEDICATED, [{"key": "dedicated", "value": "team-a"}], False),
        (DEDICATED, [{"key": "dedicated", "value": "team-b"}], True),
        (DEDICATED, [{"key": "dedicated", "operator": "Exists"}], True),
        (DEDICATED, [{"operator": "Exists"}], True),
        (DEDICATED, [{"operator": "Exists", "effect": "NoExecute"}], False),
        ({"key": "nvidia.com/gpu", "effect": "NoSchedule"}, [], False),
        ({"key": "nvidia.com/gpu", "effect": "NoSchedule"}, [{"key": "nvidia.com/gpu"}], True),
        ({"key": "node.kubernetes.io/not-ready", "effect": "NoExecute"}, [], True),
    ],
)
def test_a_taint_keeps_plans_from_a_node_unless_the_template_tolerates_it(
    taint: dict[str, str], tolerations: list[dict[str, str]], counts: bool
) -> None:
    found = beside(read("x", "NVIDIA-L40S", taints=[taint]), tolerations=tolerations)
    if counts:
        assert count(found)["NVIDIA-L40S"] == 8
    else:
        check_left_out(found, taint["key"], "template.tolerations")


def test_gke_tolerates_its_own_taint_of_gpu_nodes() -> None:
    taint = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    labels = {"cloud.google.com/gke-nodepool": "gpus"}
    assert count(beside(read("x", "NVIDIA-L4", taints=[taint], **labels)))["NVIDIA-L4"] == 8


def test_the_node_selector_chooses_the_nodes_of_a_plan() -> None:
    pool = {"pool": "b"}
    found = beside(read("x", "NVIDIA-L40S", **pool), nodeSelector=pool)
    assert count(found) == {"NVIDIA-L40S": 8}
    assert "h1, h2: lacks labels of template.nodeSelector (pool=b)" in found.unusable
    assert found.topology.gpus_per_node == {"NVIDIA-L40S": 8}


def test_the_affinity_chooses_the_nodes_of_a_plan() -> None:
    racks = {"key": "rack", "operator": "In", "values": ["a", "b"]}
    terms = [{"matchExpressions": [racks]}]
    affinity = {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": terms}}}
    nodes = [read(f"x{rack}", "NVIDIA-L40S", rack=rack) for rack in "abc"]
    found = beside(*nodes, affinity=affinity)
    assert count(found) == {"NVIDIA-L40S": 16}
    assert "xc, h1, h2: is not of those that template.affinity requires" in found.unusable
    assert found.topology.gpus_per_node == {"NVIDIA-L40S": 8}


@settings(max_examples=50)
@given(
    draw_affinities(st.sampled_from(["rack", PRODUCT]), st.sampled_from(["a", *KNOWN[:3]])),
    st.lists(st.tuples(st.sampled_from(KNOWN[:3]), st.sampled_from(["a", "b", "7"])), max_size=6),
)
def test_plans_count_the_nodes_that_the_scheduler_would_choose(
    affinity: dict[str, Any], machines: list[tuple[str, str]]
) -> None:
    nodes = [read(f"x{i}", product, rack=rack) for i, (product, rack) in enumerate(machines)]
    found = beside(*nodes, affinity=affinity)
    expected = {
        each["metadata"]["name"]
        for each in (*nodes, *HOSTS)
        if is_selected(affinity, each["metadata"]["labels"])
    }
    assert {each.name for each in found.nodes} == expected


def test_other_nodes_change_neither_the_network_nor_the_domain() -> None:
    labels = {"nvidia.com/gpu.clique": "c", "cleave.dev/infiniband-domain": "f"}
    fast = [parse_node(read(f"f{i}", "NVIDIA-H100-80GB-HBM3", **labels)) for i in range(2)]
    odd = parse_node(read("x", UNKNOWN[0]))
    usual, during = build_inventory(fast), build_inventory([odd, *fast])
    assert during.cluster == usual.cluster
    assert during.topology.domain == usual.topology.domain


def test_a_cordoned_node_is_named_when_it_no_longer_counts() -> None:
    cordon = {"key": "node.kubernetes.io/unschedulable", "timeAdded": "2026-01-01T00:00:00Z"}
    nodes = [
        parse_node(each)
        for each in (*HOSTS, read("x", HOSTS[0]["metadata"]["labels"][PRODUCT], taints=[cordon]))
    ]
    found = build_inventory(nodes, lost=list_lost(nodes, 2e9))
    assert found.cluster == ALONE.cluster
    assert found.unusable == "left out of plans: x: has been cordoned or not ready for 5 minutes"


def test_many_nodes_are_named_briefly() -> None:
    found = beside(*(read(f"x{i}", f"GPU-{i % 12}") for i in range(240)))
    assert found.cluster == ALONE.cluster
    assert len(found.unusable) < 4000
    assert "and 10 more" in found.unusable


def draw_nodes(seed: int) -> Iterable[Manifest]:
    rng = random.Random(seed)
    for number in range(rng.randint(1, 12)):
        labels = {
            name: rng.choice(["", "0", "1", "4", "none", "x", "all-disabled", "-1", "9" * 20])
            for name in (REPLICAS, "nvidia.com/gpu.count", "nvidia.com/mig.config", "pool")
            if rng.random() < 0.3
        }
        product = rng.choice([*KNOWN, *PARTS, *UNKNOWN, "", "x" * 63, "-", "…"])
        yield read(
            f"x{number}",
            product,
            rng.choice([0, 1, 8, 64]),
            [DEDICATED] * rng.randint(0, 1),
            **labels,
        )


@pytest.mark.parametrize("seed", range(20))
def test_each_of_any_nodes_is_counted_or_named(seed: int) -> None:
    nodes = list(draw_nodes(seed))
    found = beside(*nodes)
    with_gpus = {
        n["metadata"]["name"] for n in nodes if n["status"]["allocatable"]["nvidia.com/gpu"] != "0"
    }
    counted = {each.name for each in found.nodes}
    assert {"h1", "h2"} <= counted
    assert counted <= with_gpus | {"h1", "h2"}
    for name in with_gpus - counted:
        assert name in found.unusable or " more" in found.unusable
    assert found.cluster is not None
    assert "H100-SXM-80GB" in list_gpus(found.cluster)
