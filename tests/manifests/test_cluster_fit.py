"""A manual placement beside the machines of a cluster file."""

import pytest

from cleave.api.cluster import Cluster
from cleave.api.manifest import validate
from cleave.manifests import cluster_fit
from cleave.perf.model.model_shape import load_shape

TWO = Cluster.model_validate({"nodes": [{"count": 2, "gpu": "H100", "gpusPerNode": 8}]})
MIXED = Cluster.model_validate({"nodes": [{"gpu": "H100", "count": 2}, {"gpu": "B200"}]})


def find(*pools, cluster=TWO, model="meta-llama/Llama-3.1-70B", longest=8192, **spec) -> list[str]:
    document = {
        "apiVersion": "cleave.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": "chat"},
        "spec": {
            "model": {"source": model, "maxModelLen": longest},
            "slo": {"ttftMs": 600, "tpotMs": 40},
            "placement": {"manual": list(pools)},
            **spec,
        },
    }
    shape = load_shape(model) if "unknown" not in model else None
    return list(cluster_fit.list_misfits(validate(document), cluster, shape))


def pool(role="mixed", tensor=1, pipeline=1, **more):
    return {"role": role, "parallelism": {"tensor": tensor, "pipeline": pipeline}, **more}


def test_what_the_nodes_have_room_for_is_no_misfit() -> None:
    assert find(pool("prefill", 2, replicas=4), pool("decode", 4, replicas=2)) == []
    assert find(pool(tensor=16)) == []  # over both nodes
    cell = pool("prefill", 2, perCell=1, replicas=2), pool("decode", 4, perCell=1, replicas=2)
    assert find(*cell) == []
    assert find(pool(tensor=8, gpu="NVIDIA-H100-80GB-HBM3"), cluster=MIXED) == []


def test_data_parallel_ranks_share_the_experts_and_each_has_a_node() -> None:
    sparse = "Qwen/Qwen3-235B-A22B"
    size = {"tensor": 1, "data": 8, "expert": True}
    ranks = {"role": "mixed", "parallelism": size, "replicas": 2}
    assert find(ranks, model=sparse, longest=4096) == []
    (alone,) = find(pool(), model=sparse)
    assert "does not fit" in alone
    over_nodes = {"parallelism": size | {"tensor": 2}, "replicas": 1}
    assert find(ranks | over_nodes, model=sparse, longest=4096) == []
    large = {"parallelism": {"tensor": 4, "pipeline": 4, "data": 2}, "replicas": 1}
    four = Cluster.model_validate({"nodes": [{"count": 4, "gpu": "H100", "gpusPerNode": 8}]})
    (line,) = find(ranks | large, model=sparse, cluster=four)
    assert line == (
        "spec.placement.manual: the GPUs of a data-parallel rank share a node: they are 16, and a "
        "node has 8 x H100-SXM-80GB; use a smaller tensor or pipeline size"
    )


def test_weights_that_exceed_a_gpu_are_a_misfit() -> None:
    (line,) = find(pool("prefill", 2), pool("decode"))
    assert line.startswith("spec.placement.manual[1].parallelism: llama-3.1-70b does not fit: 131")


def test_a_context_whose_kv_has_no_room_beside_the_weights_is_a_misfit() -> None:
    (line,) = find(pool("prefill", 4), pool("decode", 2), longest=131_072)
    assert line.startswith(
        "spec.placement.manual[1].parallelism: llama-3.1-70b does not fit: a request may have "
        "131,072 tokens"
    )
    assert line.endswith("or set a smaller spec.model.maxModelLen")
    more = {"engine": {"args": ["--gpu-memory-utilization=0.99"]}}
    assert len(find(pool(tensor=2), longest=40_000)) == 1
    assert not find(pool(tensor=2), longest=40_000, **more)
    assert find(pool(tensor=2), longest=8192, engine={"args": ["--gpu-memory-utilization=0.85"]})


@pytest.mark.parametrize(
    ("gpu", "why"),
    [
        ("NVIDIA-B200", "no node has B200-SXM-180GB; there is H100-SXM-80GB"),
        ("NVIDIA-H1000", "unknown GPU 'NVIDIA-H1000'; did you mean H100"),
    ],
)
def test_a_gpu_that_no_node_has_is_a_misfit(gpu: str, why: str) -> None:
    (line,) = find(pool(tensor=4, gpu=gpu))
    assert line.startswith(f"spec.placement.manual[0].gpu: {why}")


def test_nodes_of_several_kinds_need_a_name() -> None:
    (line,) = find(pool(tensor=4), cluster=MIXED)
    assert line == (
        "spec.placement.manual[0].gpu: required where nodes have several kinds: one of "
        "H100-SXM-80GB, B200-SXM-180GB"
    )


def test_more_gpus_than_all_nodes_have_are_a_misfit() -> None:
    (line,) = find(pool("prefill", 2, replicas=20), pool("decode", 4, replicas=2))
    assert line == (
        "spec.placement.manual: needs 48 x H100-SXM-80GB, and the nodes have 16; use fewer or "
        "smaller instances"
    )


def test_instances_above_the_most_nodes_are_a_misfit() -> None:
    nodes = {"nodes": [{"count": 100, "gpu": "H100", "gpusPerNode": 1}]}
    many, size = Cluster.model_validate(nodes), {"tensor": 8, "pipeline": 10}
    (line,) = find(pool("decode", **size), cluster=many, model="example/unknown-9b")
    assert line.startswith("spec.placement.manual[0].parallelism: an instance of 80 GPUs")
    fits = {"tensor": 8, "pipeline": 8}
    assert not find(pool("decode", **fits), cluster=many, model="example/unknown-9b")


def test_a_cell_above_a_node_is_a_misfit() -> None:
    (line,) = find(pool("prefill", 2, perCell=1), pool("decode", 8, perCell=1))
    assert "the instances of a cell that share a node take 10 GPUs, and a node has 8" in line


def test_pods_that_do_not_fit_the_nodes_together_are_a_misfit() -> None:
    (line,) = find(pool("prefill", 2, pipeline=3, replicas=2), pool("decode", 4))
    assert line == (
        "spec.placement.manual: the 16 x H100-SXM-80GB do not fit the nodes (2 x 8): the GPUs of "
        "one pod are on one node, and these are 1 x 4 and 2 x 6; use other sizes"
    )


def test_a_model_of_unknown_size_is_only_counted() -> None:
    assert find(pool(), model="x/unknown") == []
    (line,) = find(pool(replicas=17), model="x/unknown")
    assert "needs 17 x H100-SXM-80GB" in line


def test_parts_of_gpus_are_not_counted() -> None:
    template = {"gpuResource": "nvidia.com/mig-3g.40gb"}
    assert find(pool(replicas=20), model="meta-llama/Llama-3.1-8B", template=template) == []
