"""GPUs that pools claim, and what is left of the nodes."""

from collections import Counter
from typing import Any

import pytest

from cleave.api.pool import InstancePool
from cleave.api.role import Role
from cleave.controller.cluster.gpu_claims import (
    GpuClaims,
    GpuPiece,
    has_freed,
    subtract_claims,
    sum_claims,
)
from cleave.controller.cluster.objects import ObservedNode, ObservedPod, parse_pod
from cleave.manifests.worker import build_worker_pod

H100 = "NVIDIA-H100-80GB-HBM3"


def build_pool(replicas: int = 1, tensor: int = 1, **spec: Any) -> InstancePool:
    return InstancePool.model_validate(
        {
            "apiVersion": "cleave.dev/v1alpha1",
            "kind": "InstancePool",
            "metadata": {"name": "chat-decode"},
            "spec": {
                "deployment": "chat",
                "role": "decode",
                "replicas": replicas,
                "parallelism": {"tensor": tensor},
                "revision": "r1",
                "model": "m",
                "engine": {"type": "vLLM"},
                **spec,
            },
        }
    )


def pod(node: str = "", **fields: Any) -> ObservedPod:
    given = {"name": f"p-{node}", "uid": "u", "role": Role.DECODE, "revision": "r1", "ready": True}
    return ObservedPod(**{**given, "node": node, **fields})


def claim(pool: InstancePool, *pods: ObservedPod) -> tuple[dict[str, int], dict[GpuPiece, int]]:
    claims = sum_claims([(pool, pods)], "gpu")
    return dict(claims.placed), dict(claims.waiting)


def test_a_pool_claims_what_it_is_to_have_placed_or_not() -> None:
    found = claim(build_pool(3, tensor=4), pod("a"), pod())
    assert found == ({"a": 4}, {GpuPiece(4, ""): 2})


def test_pods_that_drain_or_that_a_rollout_has_beside_the_others_claim_nothing() -> None:
    old = pod("old", revision="r0", created_s=1.0)
    rolling = claim(build_pool(1, tensor=2), old, pod("new", created_s=2.0))
    assert rolling == ({"new": 2}, {})
    assert claim(build_pool(1, tensor=2), pod("a", deleting=True)) == ({}, {GpuPiece(2, ""): 1})


def test_a_pod_claims_what_it_requests_and_a_missing_one_what_the_pool_says() -> None:
    pool = build_pool(2, tensor=4, gpu="H100-SXM-80GB")
    assert claim(pool, pod("a", num_gpus=8)) == ({"a": 8}, {GpuPiece(4, H100): 1})
    pod_manifest = build_worker_pod(pool, "p")
    parsed = parse_pod(pod_manifest)
    assert parsed is not None
    assert parsed.num_gpus == 4


def test_instances_over_nodes_claim_a_piece_of_each() -> None:
    assert claim(build_pool(1, tensor=16, nodes=2)) == ({}, {GpuPiece(8, ""): 2})


@pytest.mark.parametrize(
    "spec",
    [
        {"engine": {"type": "Emulated"}},
        {"template": {"gpuResource": "nvidia.com/mig-3g.40gb"}},
        {"template": {"resources": {"limits": {"nvidia.com/gpu": "0"}}}},
        {"replicas": 0},
    ],
)
def test_pods_without_gpus_claim_none(spec: dict[str, Any]) -> None:
    assert claim(build_pool(**spec)) == ({}, {})
    assert sum_claims([(build_pool(), ())], "cpu") == GpuClaims()


def test_cells_claim_the_gpus_of_their_engines() -> None:
    members = [
        {"role": "prefill", "replicas": 2, "parallelism": {"tensor": 1}},
        {"role": "decode", "parallelism": {"tensor": 2}},
    ]
    assert claim(build_pool(role="mixed", members=members)) == ({}, {GpuPiece(4, ""): 1})
    named = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
    pool = build_pool(role="mixed", members=members, template=named)
    assert claim(pool) == ({}, {GpuPiece(6, ""): 1})


def node(name: str, gpus: int = 8, gpu: str = H100) -> ObservedNode:
    return ObservedNode(name, True, True, gpu=gpu, num_gpus=gpus)


def leave(nodes: list[ObservedNode], placed: dict[str, int], **waiting: int) -> dict[str, int]:
    """Free GPUs by node; `waiting`: number of pods by their GPUs, such as `of_4=2`."""
    claims = GpuClaims()
    claims.placed.update(placed)
    for size, count in waiting.items():
        claims.waiting[GpuPiece(int(size.removeprefix("of_")), "")] += count
    return {each.name: each.num_gpus for each in subtract_claims(nodes, claims).nodes}


def test_placed_pods_leave_the_rest_of_their_nodes() -> None:
    nodes = [node("a"), node("b"), node("c")]
    assert leave(nodes, {"a": 8, "b": 3, "gone": 5}) == {"b": 5, "c": 8}
    assert leave([node("a", 4)], {"a": 6}) == {}


def test_pods_without_a_node_take_the_tightest_fit_largest_first() -> None:
    nodes = [node("a"), node("b"), node("c")]
    assert leave(nodes, {"a": 6, "b": 4}, of_2=1, of_4=1) == {"c": 8}
    assert leave(nodes, {}, of_4=3) == {"b": 4, "c": 8}


def test_a_pod_that_fits_nowhere_takes_nothing() -> None:
    assert leave([node("a"), node("b")], {"a": 4, "b": 4}, of_8=2) == {"a": 4, "b": 4}


def test_a_pod_without_a_node_takes_its_kind() -> None:
    claims = GpuClaims()
    claims.waiting[GpuPiece(4, "A100")] += 2
    found = subtract_claims([node("a", 4), node("b", 8, "A100"), node("c", 4, "A100")], claims)
    assert {each.name: each.num_gpus for each in found.nodes} == {"a": 4, "b": 4}
    assert (found.num_taken, found.num_total) == (8, 16)


def build_claims(pieces: int = 0, kind: str = "", **placed: int) -> GpuClaims:
    """`pieces`: pods of 4 GPUs without a node; `placed`: GPUs by node."""
    waiting = Counter({GpuPiece(4, kind): pieces} if pieces else {})
    return GpuClaims(Counter(placed), waiting)


@pytest.mark.parametrize(
    ("before", "now", "is_gain"),
    [
        (build_claims(a=4), build_claims(), True),
        (build_claims(a=4), build_claims(a=2), True),
        (build_claims(a=4), build_claims(b=4), True),
        (build_claims(), build_claims(a=4), False),
        (build_claims(pieces=2), build_claims(pieces=1), True),
        (build_claims(pieces=2), build_claims(pieces=1, a=4), False),
        (build_claims(pieces=2), build_claims(pieces=1, a=3), True),
        (build_claims(pieces=1), build_claims(pieces=1, kind=H100), True),
        (build_claims(pieces=1), build_claims(pieces=2), False),
    ],
)
def test_gpus_are_given_back_unless_pods_only_get_nodes(
    before: GpuClaims, now: GpuClaims, is_gain: bool
) -> None:
    assert has_freed(before, now) is is_gain
