"""Sizes that the workers of one engine have counted, put together.

That each counts what plans count is in tests/benchmarks/models/test_vllm_sizes.py.
"""

from types import SimpleNamespace

import pytest

from cleave_worker.vllm import model_sizes


def test_stages_have_other_layers_and_their_workers_shares_of_them() -> None:
    one, other = {"weight_bytes": 5, "experts": 8}, {"weight_bytes": 7, "experts": 8}
    executor = SimpleNamespace(collective_rpc=lambda _: [one, one, other, other])
    parallel = SimpleNamespace(tensor_parallel_size=2)
    found = model_sizes.collect_weights(executor, parallel)
    assert found == {"weight_bytes": 12, "experts": 8}


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")
def test_weights_count_that_kernels_of_cpus_keep_to_themselves() -> None:
    """They empty the tensor; that they do is seen by e2e/test_cluster_vllm.py."""
    torch = pytest.importorskip("torch")
    linear = pytest.importorskip("vllm.model_executor.layers.linear")
    layer = torch.nn.Module()
    layer.linear = linear.ReplicatedLinear.__new__(linear.ReplicatedLinear)
    torch.nn.Module.__init__(layer.linear)
    layer.linear.input_size, layer.linear.output_size = 64, 32
    layer.linear.bias = torch.nn.Parameter(torch.zeros(32))
    layer.linear.weight = torch.nn.Parameter(torch.zeros(32, 64))
    whole = model_sizes.count_weights(layer)
    assert whole["linear_bytes"] == 4 * (64 * 32 + 32)
    layer.linear.weight = torch.nn.Parameter(torch.empty(0))
    assert model_sizes.count_weights(layer) == whole


def test_a_worker_that_fails_leaves_its_answer_empty() -> None:
    assert model_sizes.count_worker_weights(SimpleNamespace()) == {}
    executor = SimpleNamespace(collective_rpc=lambda _: [{}, {"weight_bytes": 1}])
    with pytest.raises(RuntimeError, match="a worker cannot count its weights"):
        model_sizes.collect_weights(executor, SimpleNamespace(tensor_parallel_size=1))
