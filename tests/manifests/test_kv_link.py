"""The link over which a placement that was not planned transfers KV."""

from typing import Any

import pytest

from cleave.api.cluster import Cluster
from cleave.api.deployment import LLMDeployment
from cleave.api.manifest import validate
from cleave.manifests import kv_link
from cleave.manifests.topology import NodeTopology
from cleave.perf.hardware.link import LinkKind
from cleave.perf.model.model_shape import load_shape
from cleave.planner.plan import PlannedKvLink
from cleave.planner.resolved_deployment import resolve_in_cluster

from tests.support.built_pools import choose_placement
from tests.support.fake_cluster import chat

MODEL = "meta-llama/Llama-3.1-8B"
TWO = {"nodes": [{"count": 2, "gpu": "H100", "gpusPerNode": 8}]}
SEEN = {**TWO, "network": {"kind": "Ethernet", "bandwidthGbps": 25, "cellBandwidthGbps": 206.4}}
FAST = {**TWO, "network": {"kind": "InfiniBand", "bandwidthGbps": 200}}


def deploy(*pools: dict[str, Any], **engine: str) -> LLMDeployment:
    spec = {"model": MODEL, "placement": {"manual": list(pools)}}
    return validate(chat(**{"engine": {"type": "vLLM", **engine}, **spec}))


def find(deployment: LLMDeployment, nodes: dict[str, Any] = TWO) -> PlannedKvLink | None:
    cluster = Cluster.model_validate(nodes)
    topology = NodeTopology.from_cluster(cluster)
    return kv_link.find_kv_link(
        resolve_in_cluster(deployment), choose_placement(deployment), cluster, topology
    )


def pool(role: str, tensor: int = 1, **more: Any) -> dict[str, Any]:
    return {"role": role, "parallelism": {"tensor": tensor}, **more}


def test_kv_between_pods_takes_the_network() -> None:
    pair = deploy(pool("prefill"), pool("decode"))
    assert find(pair) == PlannedKvLink(LinkKind.ETHERNET, pytest.approx(0.36 * 25 / 8))
    assert find(pair, FAST) == PlannedKvLink(LinkKind.INFINIBAND, pytest.approx(0.72 * 200 / 8))


def test_several_gpus_that_receive_share_what_one_sends() -> None:
    one, other = (find(deploy(pool("prefill"), pool("decode", tensor))) for tensor in (1, 4))
    assert one is not None
    assert other is not None
    assert other.gb_per_s == pytest.approx(one.gb_per_s / 4)


def test_kv_inside_a_cell_that_is_one_pod_takes_nvlink_where_that_was_seen() -> None:
    cell = pool("prefill", perCell=1), pool("decode", perCell=1)
    link = find(deploy(*cell))
    assert link is not None
    assert link.kind is LinkKind.ETHERNET
    link = find(deploy(*cell), SEEN)
    assert link == PlannedKvLink(LinkKind.NVLINK, pytest.approx(25.8))
    # A cell of 16 GPUs fits no node.
    link = find(deploy(pool("prefill", 8, perCell=1), pool("decode", 8, perCell=1)), SEEN)
    assert link is not None
    assert link.kind is LinkKind.ETHERNET


def test_of_several_kinds_of_gpu_the_slower_network_counts() -> None:
    nodes = {"nodes": [{"gpu": "H100"}, {"gpu": "L4"}], "network": {"bandwidthGbps": 800}}
    named = deploy(pool("prefill", gpu="H100"), pool("decode", gpu="H100"))
    fast, slow = find(named, nodes), find(deploy(pool("prefill"), pool("decode")), nodes)
    assert fast is not None
    assert slow is not None
    assert slow.gb_per_s < fast.gb_per_s


def test_without_handoffs_or_with_unknown_gpus_there_is_no_link() -> None:
    assert find(deploy(pool("mixed"))) is None
    assert find(deploy(pool("prefill"), pool("decode"), type="Emulated")) is None
    assert find(deploy(pool("prefill"), pool("decode")), {"nodes": [{"gpu": "H999"}]}) is None


def test_a_link_that_is_too_slow_for_the_ttft_target_is_explained() -> None:
    deployment = deploy(pool("prefill"), pool("decode"))
    placement, shape = choose_placement(deployment), load_shape(MODEL)

    def explain(nodes: dict[str, Any], tokens: float) -> str | None:
        cluster = Cluster.model_validate(nodes)
        machines = NodeTopology.from_cluster(cluster)
        return kv_link.explain_slow_link(
            resolve_in_cluster(deployment), placement, cluster, machines, shape, tokens
        )

    assert explain(FAST, 1000) is None
    why = explain(TWO, 4000)
    assert why is not None
    assert "the KV of a mean prompt (4,000 tokens) takes 466 ms over Ethernet" in why
    assert "spec.slo.ttftMs" in why
