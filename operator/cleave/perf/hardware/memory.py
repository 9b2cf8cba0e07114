"""How much of a GPU's memory is available for KV. Used by the planner.

What is hard: engines do not report in advance what they will use. The default reserve is taken from
vLLM's start-up reports; DistServe's published capacities follow from another reserve. An engine
ends at its start if one request of its longest context does not fit.
"""

from dataclasses import dataclass, replace

from cleave.perf.hardware.gpu import Gpu
from cleave.perf.model.model_shape import ModelShape

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class MemoryReserve:
    """Memory of one GPU that an engine uses besides weights and KV cache."""

    utilisation: float = 0.92
    """Share of the device's memory that the engine may use (vLLM's gpu_memory_utilization)."""
    runtime_gib: float = 0.6
    """CUDA context, workspaces of libraries."""
    graphs_gib: float = 0.6
    """Captured CUDA graphs, which vLLM counts since 0.21; reports of dense models have 0.2 to 0.7
    (gpustack/runner 251, noonghunna/club-3090 127, wtdcode/vllm-backport 15)."""
    collective_gib: float = 1.5
    """Buffers of the collective library; only with several GPUs."""
    max_num_batched_tokens: int = 8192
    """Tokens of the largest iteration; their activations must fit."""
    max_num_seqs: int = 256
    """Rows of logits in the largest iteration."""
    outside_gib: float = 0.0
    """Taken beside `utilisation`; where the rest of the device is smaller, KV has to make room."""
    kv_bytes: int | None = None
    """KV in bytes, if it is set instead of `utilisation`."""
    block_tokens: int = 16
    """Tokens of a block of KV."""
    start_margin: float = 0.02
    """Share of the device that remains beside the longest context, so that an engine surely starts:
    the largest known error of this estimate (2.4 of 140 GiB, llm-d-benchmark 345)."""


VLLM_RESERVE = MemoryReserve()
"""vLLM with its serving defaults."""
NO_ROOM = "a request may have"
"""Part of each reason that an instance has no room for the longest request."""
_MIB = 1 / 1024
NCCL_RESERVE = replace(VLLM_RESERVE, outside_gib=(8 * 342 + 384) * _MIB)
"""The same where Cleave's connector transfers KV over NCCL: communicators with up to 8 peers of 342
MiB each (`cleave_worker.transfer.transports.nccl`), and staging buffers
(docs/decisions/kv-transports.md)."""


def compute_weight_bytes(shape: ModelShape, tensor: int, pipeline: int, data: int = 1) -> int:
    """Bytes of weights on one GPU of the stage with the most layers. `data` ranks share the experts
    of each layer, and each has all other weights.

    The embedding is on the first stage, the LM head on the last one, both sharded over `tensor`
    GPUs; tied ones are stored on both stages if these differ.
    """
    embedding = shape.embedding_parameters * shape.dtype_bytes / tensor
    head = shape.compute_lm_head_bytes() / tensor
    if pipeline == 1:
        tables = embedding if shape.has_tied_embeddings else embedding + head
    else:
        tables = max(embedding, head)
    layers = _compute_layer_bytes(shape, tensor, pipeline, data)
    return round(tables + layers) + shape.compute_mtp_bytes(tensor)


def compute_activation_bytes(
    shape: ModelShape, tensor: int, reserve: MemoryReserve = VLLM_RESERVE
) -> int:
    """Peak activation memory of one iteration on one GPU: token states and the sampler's logits.

    Token states are the residual and the normed hidden state and the MLP's inner states; logits are
    32 bits with two copies (probabilities, sorted). vLLM's start-up report gives 1.26 GiB for
    Llama-3-8B and 8,192 tokens (vllm-project/vllm, pull request 10511), this function 1.15.
    """
    width = shape.intermediate_size
    if shape.experts is not None:
        routed = shape.experts.per_token * shape.experts.intermediate_size
        width = routed + shape.experts.shared_intermediate_size
    inner = (3 if shape.has_gated_mlp else 1) * width / tensor
    states = reserve.max_num_batched_tokens * (2 * shape.hidden_size + inner) * shape.dtype_bytes
    logits = reserve.max_num_seqs * shape.vocab_size * 4 * 3
    return round(states + logits)


def compute_kv_capacity_tokens(
    shape: ModelShape,
    gpu: Gpu,
    tensor: int,
    pipeline: int,
    reserve: MemoryReserve = VLLM_RESERVE,
    context_tokens: int | None = None,
    data: int = 1,
) -> int:
    """Tokens of KV that fit on an engine (a rank, if `data` is above 1), over all its GPUs; 0: the
    weights do not fit.

    With windows or states a request's bytes are not in proportion to its tokens: the capacity is
    for requests with a context of `context_tokens` (None: of the longest).
    """
    free = _compute_free_bytes(shape, gpu, tensor, pipeline, reserve, data)
    tokens = min(context_tokens or shape.max_model_len, shape.max_model_len)
    if shape.keeps_whole_contexts:
        return max(0, int(free // shape.compute_kv_bytes_on_gpu(tensor, pipeline)))
    return max(
        0, int(free * tokens // shape.compute_context_bytes_on_gpu(tokens, tensor, pipeline))
    )


def compute_max_context_tokens(
    shape: ModelShape,
    gpu: Gpu,
    tensor: int,
    pipeline: int,
    reserve: MemoryReserve = VLLM_RESERVE,
    data: int = 1,
) -> int:
    """The longest context, up to the model's, with which an engine starts: vLLM ends where one
    request of so many tokens does not fit (`check_enough_kv_cache_memory`). In whole blocks, one of
    which is kept free; windows have room for the tokens of an iteration beside them."""
    free = _compute_free_bytes(shape, gpu, tensor, pipeline, reserve, data)
    if reserve.kv_bytes is None:
        free -= reserve.start_margin * gpu.memory_bytes

    def fits(blocks: int) -> bool:
        tokens = (blocks + 1) * reserve.block_tokens
        beside = reserve.max_num_batched_tokens + reserve.block_tokens
        return shape.compute_context_bytes_on_gpu(tokens, tensor, pipeline, beside=beside) <= free

    if fits(-(-shape.max_model_len // reserve.block_tokens)):
        return shape.max_model_len
    low, high = 0, shape.max_model_len // reserve.block_tokens + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * reserve.block_tokens


def explain_unsupported(
    shape: ModelShape,
    gpu: Gpu,
    tensor: int,
    pipeline: int,
    reserve: MemoryReserve = VLLM_RESERVE,
    data: int = 1,
    *,
    expert: bool = False,
    context_tokens: int = 0,
) -> str | None:
    """Why the model cannot be served with this parallelism, in a sentence; None: it can.
    `context_tokens`: of the longest request that has to fit."""
    if (reason := shape.explain_unsupported(tensor, pipeline, data, expert=expert)) is not None:
        return f"{shape.name}: {reason}"
    if compute_kv_capacity_tokens(shape, gpu, tensor, pipeline, reserve, data=data) > 0:
        room = compute_max_context_tokens(shape, gpu, tensor, pipeline, reserve, data)
        if room >= min(context_tokens, shape.max_model_len):
            return None
        return (
            f"{shape.name} does not fit: {NO_ROOM} {context_tokens:,} tokens, and beside "
            f"the weights on {gpu.name} there is room for the KV of {room:,} (tensor {tensor}, "
            f"pipeline {pipeline})"
        )
    weights = compute_weight_bytes(shape, tensor, pipeline, data) / _GIB
    spare = _compute_free_bytes(shape, gpu, tensor, pipeline, reserve, data) / _GIB + weights
    return (
        f"{shape.name} does not fit: {weights:.1f} GiB of weights on each {gpu.name}, "
        f"which has {spare:.1f} GiB for weights and KV"
    )


def _compute_free_bytes(
    shape: ModelShape, gpu: Gpu, tensor: int, pipeline: int, reserve: MemoryReserve, data: int
) -> float:
    runtime = reserve.runtime_gib + reserve.graphs_gib
    if tensor * pipeline * data > 1:
        runtime += reserve.collective_gib
    taken = compute_weight_bytes(shape, tensor, pipeline, data) + runtime * _GIB
    taken += compute_activation_bytes(shape, tensor, reserve)
    most = gpu.memory_bytes - reserve.outside_gib * _GIB
    if reserve.kv_bytes is not None:
        beside = most - taken - reserve.kv_bytes
        return beside if beside < 0 else reserve.kv_bytes
    return min(gpu.memory_bytes * reserve.utilisation, most) - taken


def _compute_layer_bytes(shape: ModelShape, tensor: int, pipeline: int, data: int) -> float:
    """Bytes of the layers on one GPU of the stage with the most layers."""
    dense, sparse = shape.compute_layer_mlp_bytes(tensor, data)
    count = shape.count_layers_per_stage(pipeline)
    # Dense layers come first, so that a later stage may have none of them.
    sparse_layers = min(count, shape.expert_layers)
    mlps = sparse_layers * sparse + min(count - sparse_layers, shape.dense_mlp_layers) * dense
    return count * shape.compute_attention_weight_bytes(tensor) + mlps
