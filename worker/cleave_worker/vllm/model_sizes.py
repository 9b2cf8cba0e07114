"""Counts the weights of the model that a worker of vLLM has loaded, for the report about it.

Runs in each worker, called by the engine's core (`cleave_worker.vllm.model_report`). What is hard:
a worker has its share only, and formats pack several weights into a value; so weights are counted
by the sizes of vLLM's layers, and bytes by their tensors, both for the model as a whole.
"""

import logging
from collections.abc import Iterator
from typing import Any

_log = logging.getLogger(__name__)


def collect_weights(executor: Any, parallel: Any) -> dict[str, int]:  # noqa: ANN401
    """The sizes of the model of vLLM's executor. Raises Exception."""
    # Without a time limit, as the calls before it: an answer that comes later would be taken for
    # that to the next call, and an executor notices workers that end.
    found = executor.collective_rpc(count_worker_weights)
    if not all(found):
        raise RuntimeError("a worker cannot count its weights; see its log")
    # Workers of one stage have shares of the same layers, and stages have others.
    stages = found[:: parallel.tensor_parallel_size]
    first = stages[0]
    return {
        name: first[name] if name in _ALIKE else sum(each[name] for each in stages)
        for name in first
    }


def count_worker_weights(worker: Any) -> dict[str, int]:  # noqa: ANN401
    """What `count_weights` says about the model of a worker, which vLLM calls it with. Empty: it
    failed. An error that is raised would leave answers of other workers unread."""
    try:
        return count_weights(worker.get_model())
    except Exception:  # noqa: BLE001
        _log.exception("weights are not counted")
        return {}


_ALIKE = ("experts", "experts_per_token", "expert_width", "expert_hidden_size", "expert_matrices")


def count_weights(model: Any) -> dict[str, int]:  # noqa: ANN401
    """Fields of `cleave.perf.model.model_report.SizeFacts`."""
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    sizes = dict.fromkeys(("weight_bytes", "linear_weights", "linear_bytes", "expert_bytes"), 0)
    sizes |= dict.fromkeys(("expert_layers", *_ALIKE), 0)
    language = {id(each) for each in _get_language_model(model).modules()}
    seen: set[int] = set()
    for module in model.modules():
        own = sum(each.nbytes for each in _list_new(module, seen))
        is_language = id(module) in language
        if isinstance(module, RoutedExperts):
            own = _count_experts(module, own, sizes)
        elif isinstance(module, LinearBase):
            weights, whole = _count_linear(module)
            own = round((own + _count_packed(module, weights)) * whole / weights)
            if is_language:
                sizes["linear_weights"] += whole
                sizes["linear_bytes"] += own
        elif isinstance(module, VocabParallelEmbedding):
            own = own * module.num_embeddings_padded // module.num_embeddings_per_partition
        sizes["weight_bytes"] += own
    return sizes


def _get_language_model(model: Any) -> Any:  # noqa: ANN401
    get = getattr(model, "get_language_model", None)
    return model if get is None else get()


def _list_new(module: Any, seen: set[int]) -> Iterator[Any]:  # noqa: ANN401
    """The tensors of a module itself that no other one before it has."""
    for each in module.parameters(recurse=False):
        if id(each) not in seen:
            seen.add(id(each))
            yield each


def _count_linear(module: Any) -> tuple[int, int]:  # noqa: ANN401
    """(weights on this GPU, weights of the whole layer)."""
    inputs, outputs = module.input_size, module.output_size
    own_inputs = getattr(module, "input_size_per_partition", inputs)
    own_outputs = getattr(module, "output_size_per_partition", outputs)
    return own_inputs * own_outputs, inputs * outputs


def _count_packed(module: Any, weights: int) -> int:  # noqa: ANN401
    """Bytes of the weights of a layer whose tensor vLLM emptied: on CPUs a kernel has its own copy,
    in the kernel's order (`dispatch_cpu_unquantized_gemm`)."""
    kept = getattr(module, "weight", None)
    return weights * kept.dtype.itemsize if kept is not None and not kept.numel() else 0


def _count_experts(module: Any, own: int, sizes: dict[str, int]) -> int:  # noqa: ANN401
    """Add a layer of experts, and return its bytes on all GPUs; `own`: those on this one."""
    config = module.moe_config
    count = max(1, config.num_local_experts)
    own = own * config.num_experts // count * config.moe_parallel_config.tp_size
    sizes["expert_layers"] += 1
    sizes["expert_bytes"] += own
    sizes["experts"] = config.num_experts
    sizes["experts_per_token"] = config.experts_per_token
    sizes["expert_width"] = config.intermediate_size
    sizes["expert_hidden_size"] = config.hidden_dim_unpadded
    sizes["expert_matrices"] = 3 if config.is_act_and_mul else 2
    return own
