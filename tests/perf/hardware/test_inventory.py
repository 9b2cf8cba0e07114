"""From a cluster file and a deployment's choices to described GPUs."""

from dataclasses import replace

import pytest

from cleave.api.cluster import Cluster, NetworkKind, NetworkSpec, NodeGroup
from cleave.api.manifest import ManifestError, load_cluster
from cleave.api.planning import GpuChoice
from cleave.perf.hardware.gpu import Gpu, find_gpu
from cleave.perf.hardware.inventory import (
    describe_assumed_all_reduces,
    describe_assumed_network,
    find_cell_link,
    find_network_link,
    list_gpus,
    list_unknown_gpus,
    list_unused_gpus,
    to_gpu,
)
from cleave.perf.hardware.link import LinkKind
from cleave.perf.kernels.tables import find_tables

MIXED = load_cluster(
    "nodes: [{gpu: H100}, {gpu: A100-80GB, count: 2}, {gpu: nvidia-h100-80gb-hbm3}]"
)
OWN = """
nodes: [{gpu: Trainer-X}]
gpus:
- {name: Trainer-X, memoryGib: 64, memoryGbps: 2000, denseTflops: 400, powerWatts: 500}
"""


def faults(cluster: Cluster, *choices: GpuChoice) -> tuple[str, ...]:
    with pytest.raises(ManifestError) as raised:
        list_gpus(cluster, choices)
    return raised.value.faults


def test_names_and_labels_of_one_gpu_are_one_kind() -> None:
    assert list(list_gpus(MIXED)) == ["H100-SXM-80GB", "A100-SXM-80GB"]


def test_a_gpu_of_ones_own_is_read_field_by_field() -> None:
    cluster = load_cluster(OWN)
    expected = Gpu("Trainer-X", 64, 2000, 400, None, None, 32, 500, 0)
    assert list_gpus(cluster) == {"Trainer-X": expected}
    assert to_gpu(cluster.gpus[0]) == expected


def test_every_unknown_gpu_is_named_with_its_place_and_a_remedy() -> None:
    nodes = "{gpu: H100-SXM-80G}, {gpu: abacus}, {gpu: NVIDIA-A100-SXM4-40GB-MIG-1g.5gb}"
    cluster = load_cluster(f"nodes: [{nodes}, {{gpu: H100}}]")
    first, second, third = list_unknown_gpus(cluster)
    assert first == (
        "nodes[0].gpu: unknown GPU 'H100-SXM-80G'; did you mean H100-SXM-80GB?; "
        "or describe it under gpus"
    )
    assert second.startswith("nodes[1].gpu: unknown GPU 'abacus'; known: A100-SXM-40GB, ")
    assert third.startswith("nodes[2].gpu: 'NVIDIA-A100-SXM4-40GB-MIG-1g.5gb' is a part")
    assert [*list_gpus(cluster)] == ["H100-SXM-80GB"]
    assert faults(load_cluster(f"nodes: [{nodes}]")) == (first, second, third)
    only = GpuChoice(type="abacus")
    assert faults(cluster, only)[0].startswith("spec.planning.gpus[0].type: unknown GPU 'abacus'")


def test_choices_narrow_down_and_set_prices_and_caps() -> None:
    choice = GpuChoice(type="H100", price_per_hour=2.5, power_cap_watts=350)
    (gpu,) = list_gpus(MIXED, [choice]).values()
    assert (gpu.name, gpu.price_per_hour, gpu.power_watts) == ("H100-SXM-80GB", 2.5, 350)
    assert gpu.dense_tflops < 989


def test_every_fault_of_the_choices_is_reported() -> None:
    messages = faults(
        MIXED,
        GpuChoice(type="L40S"),
        GpuChoice(type="H1000"),
        GpuChoice(type="A100-80GB", power_cap_watts=100),
    )
    assert messages[0] == (
        "spec.planning.gpus[0].type: the cluster has no L40S; it has H100-SXM-80GB, A100-SXM-80GB"
    )
    assert messages[1].startswith(
        "spec.planning.gpus[1].type: unknown GPU 'H1000'; did you mean H100"
    )
    assert messages[2].startswith(
        "spec.planning.gpus[2]: powerCapWatts 100 is below half of the 400 W"
    )


def test_the_network_of_the_file_is_one_gpus_link() -> None:
    network = NetworkSpec(bandwidth_gbps=100, latency_us=20, kind=NetworkKind.ETHERNET)
    cluster = Cluster(nodes=[NodeGroup(gpu="H100")], network=network)
    link = find_network_link(cluster, list_gpus(cluster)["H100-SXM-80GB"])
    assert (link.kind, link.gb_per_s, link.latency_us) == (LinkKind.ETHERNET, 12.5, 20)


def test_without_a_network_ethernet_is_assumed_and_said() -> None:
    bare = Cluster.model_validate({"nodes": [{"gpu": "H100"}]})
    link = find_network_link(bare, list_gpus(bare)["H100-SXM-80GB"])
    assert (link.kind, link.gb_per_s) == (LinkKind.ETHERNET, 25 / 8)
    assert describe_assumed_network(bare) == (
        "network: not in the cluster file; Ethernet with 25 Gbit/s for each GPU is assumed for KV "
        "and for instances over nodes"
    )


def test_links_within_a_node_say_nothing_of_those_between_nodes() -> None:
    network = {"nodeAllReduceGbps": 128, "cellBandwidthGbps": 1920}
    within = Cluster.model_validate({"nodes": [{"gpu": "H100"}], "network": network})
    link = find_network_link(within, list_gpus(within)["H100-SXM-80GB"])
    assert (link.kind, link.gb_per_s) == (LinkKind.ETHERNET, 25 / 8)
    assert "Ethernet with 25 Gbit/s" in (describe_assumed_network(within) or "")
    assert find_cell_link(within, list_gpus(within)["H100-SXM-80GB"]) is not None


@pytest.mark.parametrize("kind", ["InfiniBand", "RoCE", "RoCEv2"])
def test_roce_is_as_fast_as_infiniband(kind: str) -> None:
    network = {"kind": kind, "bandwidthGbps": 400}
    cluster = Cluster.model_validate({"nodes": [{"gpu": "H100"}], "network": network})
    link = find_network_link(cluster, list_gpus(cluster)["H100-SXM-80GB"])
    assert (link.kind, link.gb_per_s) == (LinkKind.INFINIBAND, 50)
    assert describe_assumed_network(cluster) is None
    unnamed = Cluster.model_validate({"nodes": [{"gpu": "H100"}], "network": {"latencyUs": 1}})
    assert "InfiniBand with 200 Gbit/s" in (describe_assumed_network(unnamed) or "")


def test_all_reduces_over_pcie_are_as_fast_as_the_file_says_or_assumed_and_said() -> None:
    nodes = [{"gpu": "L40S", "gpusPerNode": 4}, {"gpu": "H100"}]
    bare = Cluster.model_validate({"nodes": nodes})
    assert list_gpus(bare)["L40S"].all_reduce_gbps is None
    assert "between L40S are counted" in (describe_assumed_all_reduces(bare) or "")
    said = Cluster.model_validate({"nodes": nodes, "network": {"nodeAllReduceGbps": 128}})
    found = list_gpus(said)
    assert (found["L40S"].all_reduce_gbps, found["H100-SXM-80GB"].all_reduce_gbps) == (16, None)
    assert describe_assumed_all_reduces(said) is None
    alone = Cluster.model_validate({"nodes": [{"gpu": "L40S", "gpusPerNode": 1}]})
    assert describe_assumed_all_reduces(alone) is None


def test_a_described_gpu_of_the_catalogue_keeps_its_names_and_what_is_not_written() -> None:
    cluster = load_cluster(
        """
nodes: [{gpu: NVIDIA-H100-80GB-HBM3}]
gpus:
- {name: H100, memoryGib: 79.1, memoryGbps: 3350, denseTflops: 989, pricePerHour: 2.5}
"""
    )
    (gpu,) = list_gpus(cluster).values()
    catalogue = find_gpu("H100")
    assert gpu == replace(catalogue, price_per_hour=2.5)
    assert find_tables(gpu) is not None
    assert list(list_unused_gpus(cluster)) == []


def test_a_described_gpu_that_no_node_has_is_reported() -> None:
    text = "nodes: [{gpu: H100}]\n" + OWN.split("nodes: [{gpu: Trainer-X}]")[1]
    assert list(list_unused_gpus(load_cluster(text))) == [
        "gpus[0]: no node has Trainer-X; the description has no effect"
    ]
