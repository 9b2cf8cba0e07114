"""The machines as the planner takes them."""

from dataclasses import replace

import pytest

from cleave.api.cluster import Cluster, NetworkKind
from cleave.api.pods.worker_template import WorkerTemplate
from cleave.controller.cluster.gpu_claims import FreeGpus, QuotaShare
from cleave.controller.cluster.inventory import (
    UNUSABLE_S,
    build_inventory,
    list_lost,
    select_free,
)
from cleave.controller.cluster.objects import ObservedNode, parse_node, parse_timestamp


def node(name: str, gpu: str = "H100", count: int = 8, **more) -> ObservedNode:
    return ObservedNode(name, True, True, gpu=gpu, num_gpus=count, **more)


def test_nodes_that_are_alike_are_one_group() -> None:
    found = build_inventory(
        [node("a"), node("b"), node("c", "L40S", 4), ObservedNode("d", True, True)]
    )
    assert found.cluster is not None
    groups = [(each.gpu, each.gpus_per_node, each.count) for each in found.cluster.nodes]
    assert groups == [("H100", 8, 2), ("L40S", 4, 1)]
    assert found.topology.gpus_per_node == {"L40S": 4, "H100": 8}


def test_without_gpus_there_is_no_cluster() -> None:
    assert build_inventory([ObservedNode("a", True, True)]).cluster is None


def test_numbers_and_kinds_are_distinguished() -> None:
    one, two = build_inventory([node("a")]), build_inventory([node("a"), node("b")])
    assert one.node_kinds_hash == two.node_kinds_hash
    assert one.node_counts_hash != two.node_counts_hash
    assert build_inventory([node("a", "L40S")]).node_kinds_hash != one.node_kinds_hash


def test_a_node_that_fails_for_a_while_changes_nothing() -> None:
    down = ObservedNode("a", ready=False, schedulable=True, gpu="H100", num_gpus=8)
    assert build_inventory([down]) == build_inventory([node("a")])


def test_the_network_counts_as_fast_only_when_all_nodes_declare_it() -> None:
    offered, declared = node("a", offers_rdma=True), node("b", infiniband_domain="fabric")
    slow = build_inventory([offered, node("b")]).cluster
    fast = build_inventory([offered, declared]).cluster
    assert slow is not None
    assert fast is not None
    assert slow.network.kind is NetworkKind.ETHERNET
    assert fast.network.kind is NetworkKind.INFINIBAND


def test_whole_cards_count_only_for_pods_that_request_them() -> None:
    amounts = {"nvidia.com/gpu": "8", "nvidia.com/hostdev": "8"}
    labels = {"nvidia.com/gpu.product": "H100"}
    manifest = {"metadata": {"name": "a", "labels": labels}, "status": {"allocatable": amounts}}
    whole = parse_node(manifest)
    amounts["rdma/hca"] = "63"
    both = parse_node(manifest)
    for nodes, requests, kind in (
        ([whole], True, NetworkKind.INFINIBAND),
        ([whole], False, NetworkKind.ETHERNET),
        ([both], False, NetworkKind.INFINIBAND),
    ):
        annotations = {"k8s.v1.cni.cncf.io/networks": "fabric"} if requests else {}
        found = build_inventory(nodes, template=WorkerTemplate(annotations=annotations))
        assert found.cluster is not None
        assert found.cluster.network.kind is kind


def test_a_restart_of_the_rdma_plug_in_changes_no_plan() -> None:
    def read_node(capacity: str, allocatable: str) -> ObservedNode:
        gpus = {"nvidia.com/gpu": "8"}
        return parse_node(
            {
                "metadata": {"name": "a", "labels": {"nvidia.com/gpu.product": "H100"}},
                "status": {
                    "capacity": {**gpus, "rdma/hca": capacity},
                    "allocatable": {**gpus, "rdma/hca": allocatable},
                },
            }
        )

    usual = build_inventory([read_node("63", "63")])
    assert usual.cluster is not None
    assert usual.cluster.network.kind is NetworkKind.INFINIBAND
    for amounts in (("63", "0"), ("0", "0")):
        during = build_inventory([read_node(*amounts)])
        assert during.node_kinds_hash == usual.node_kinds_hash
        assert during.cluster == usual.cluster
        # New pods could not get one now.
        assert during.topology.get_rdma_device("H100") == ""


def test_settings_say_what_nodes_do_not() -> None:
    declared = Cluster.model_validate(
        {"nodes": [{"gpu": "none"}], "network": {"bandwidthGbps": 400}, "profiles": ["/p.yaml"]}
    )
    found = build_inventory([node("a")], declared)
    assert found.cluster is not None
    assert found.cluster.network.bandwidth_gbps == 400
    assert found.cluster.profiles == ["/p.yaml"]
    assert found.cluster.nodes[0].gpu == "H100"


def test_cliques_are_the_domain_only_where_every_node_has_one() -> None:
    assert build_inventory([node("a", clique="c")]).topology.domain == "nvidia.com/gpu.clique"
    some = build_inventory([node("a", clique="c"), node("b")])
    assert some.topology.domain == "kubernetes.io/hostname"


def test_a_node_that_shares_its_gpus_offers_the_planner_no_more_than_it_looks_at() -> None:
    found = build_inventory([node("a", count=512), node("b", count=256)])
    assert found.cluster is not None
    assert [(each.gpus_per_node, each.count) for each in found.cluster.nodes] == [(128, 2)]


def test_a_kind_of_gpu_has_the_rdma_device_that_all_its_nodes_offer() -> None:
    nodes = [
        node("a", rdma_device="rdma/hca"),
        node("b", rdma_device="rdma/hca"),
        node("c", "L40S", rdma_device="rdma/hca"),
        node("d", "L40S"),
    ]
    topology = build_inventory(nodes).topology
    assert topology.get_rdma_device("H100") == "rdma/hca"
    assert topology.get_rdma_device("L40S") == ""
    assert topology.get_rdma_device(None) == ""
    assert build_inventory(nodes[:2]).topology.get_rdma_device(None) == "rdma/hca"


def test_nodes_that_cannot_run_the_image_are_named() -> None:
    fault = "has driver 570, and CUDA 13 needs 580 or newer"
    nodes = [node("a"), node("b", fault=fault), node("c", fault=fault)]
    found = build_inventory(nodes, needs_own_image=True)
    assert found.unusable == f"left out of plans: b, c: {fault}"
    assert build_inventory(nodes).unusable == ""


def test_plans_with_the_image_leave_out_nodes_that_cannot_run_it() -> None:
    nodes = [node("a"), node("b", fault="is arm64"), node("c", "GB200", 4, fault="is arm64")]
    everywhere, limited = build_inventory(nodes), build_inventory(nodes, needs_own_image=True)
    assert everywhere.topology.gpus_per_node == {"H100": 8, "GB200": 4}
    assert limited.topology.gpus_per_node == {"H100": 8}
    assert limited.cluster is not None
    assert [(each.gpu, each.count) for each in limited.cluster.nodes] == [("H100", 1)]
    assert limited.unusable == "left out of plans: b, c: is arm64"
    assert everywhere.unusable == ""
    assert limited.node_kinds_hash == build_inventory([node("a")]).node_kinds_hash
    assert build_inventory(nodes[1:], needs_own_image=True).cluster is None


def count_nodes(nodes: list[ObservedNode], now_s: float = 1e6) -> dict[str, int]:
    cluster = build_inventory(nodes, lost=list_lost(nodes, now_s)).cluster
    assert cluster is not None
    return {each.gpu: each.count for each in cluster.nodes}


def test_a_node_counts_until_it_has_been_unusable_for_long_and_at_once_when_it_is_back() -> None:
    lost, others = node("a", unusable_since_s=1_000.0), [node("b"), node("c", "L40S")]
    assert count_nodes([lost, *others], 1_000.0 + UNUSABLE_S) == {"H100": 2, "L40S": 1}
    assert count_nodes([*others, lost], 1_001.0 + UNUSABLE_S) == {"H100": 1, "L40S": 1}
    assert count_nodes([node("a"), *others], 1_002.0 + UNUSABLE_S) == {"H100": 2, "L40S": 1}


def test_the_last_nodes_of_a_kind_count_although_they_seem_lost() -> None:
    lost = [node(name, unusable_since_s=0.0) for name in "ab"]
    assert count_nodes([*lost, node("c", "L40S")]) == {"H100": 2, "L40S": 1}


def test_a_cordon_changes_neither_network_nor_topology_nor_the_kinds() -> None:
    slow = node("a", unusable_since_s=0.0)
    fast = node("b", offers_rdma=True, rdma_device="rdma/hca", clique="c")
    nodes = [slow, fast, node("c", "L40S")]
    during, usual = build_inventory(nodes, lost=frozenset("a")), build_inventory(nodes)
    assert during.node_kinds_hash == usual.node_kinds_hash
    assert during.topology == usual.topology
    assert during.cluster is not None
    assert during.cluster.network.kind is NetworkKind.ETHERNET
    assert during.node_counts_hash != usual.node_counts_hash


def test_a_cordoned_node_counts_when_the_others_cannot_run_the_image() -> None:
    nodes = [node("a", unusable_since_s=0.0), node("b", fault="is arm64")]
    found = build_inventory(nodes, lost=list_lost(nodes, 1e6), needs_own_image=True)
    assert found.cluster is not None
    assert [(each.gpu, each.count) for each in found.cluster.nodes] == [("H100", 1)]


READY = {"type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:10:00Z"}
LOST = {**READY, "status": "Unknown"}
CORDON = {"key": "node.kubernetes.io/unschedulable", "timeAdded": "2026-01-01T00:05:00Z"}
OTHER = {"key": "nvidia.com/gpu", "timeAdded": "2025-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    ("condition", "taints", "minutes"),
    [
        (READY, [], None),
        (READY, [OTHER], None),
        (LOST, [], 10),
        (READY, [CORDON], 5),
        (LOST, [OTHER, CORDON], 5),
        (LOST, None, 10),
        ({**LOST, "lastTransitionTime": None}, [], None),
        (READY, [{"key": CORDON["key"]}], None),
    ],
)
def test_since_when_a_node_is_unusable_is_what_the_cluster_has_noted(
    condition, taints, minutes
) -> None:
    status, spec = {"conditions": [condition]}, {"taints": taints}
    parsed = parse_node({"metadata": {"name": "a"}, "status": status, "spec": spec})
    start = parse_timestamp("2026-01-01T00:00:00Z")
    expected = None if minutes is None else start + 60 * minutes
    assert parsed.unusable_since_s == expected


def test_a_quota_bounds_a_plan_where_it_leaves_fewer_gpus_than_the_nodes() -> None:
    whole = build_inventory([node("a"), node("b")])
    free = FreeGpus((node("a", count=5), node("b")), num_taken=3, num_total=16)
    loose = select_free(whole, free, QuotaShare("gpus", 13, 32))
    assert loose == replace(select_free(whole, free), max_gpus=13), "scaling adds no more than that"
    tight = select_free(whole, free, QuotaShare("gpus", 4, 6))
    assert (tight.max_gpus, tight.cluster) == (4, loose.cluster)
    assert (
        tight.taken == "ResourceQuota gpus leaves 4 of 6 GPUs; other deployments have 3 of 16 GPUs"
    )
    tighter = select_free(whole, free, QuotaShare("gpus", 3, 6))
    assert len({loose.counts_hash, tight.counts_hash, tighter.counts_hash}) == 3
    none = select_free(whole, FreeGpus(whole.nodes, 0, 16), QuotaShare("gpus", 0, 6))
    assert (none.cluster, none.taken) == (None, "ResourceQuota gpus leaves 0 of 6 GPUs")
