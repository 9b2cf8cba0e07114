"""Describes vLLM's layout and sharding of a model's KV with the types that handoffs compare."""

import os
from collections.abc import Sequence

import torch
from vllm.config import VllmConfig
from vllm.distributed.utils import get_pp_indices
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from cleave.rpc.revision import WEIGHTS_ENV
from cleave_worker.transfer.handoff import KvLayout
from cleave_worker.transfer.sharding import ParallelShape, ShardSpec


def build_shape(config: VllmConfig) -> ParallelShape:
    """Return the parallelism of an engine."""
    parallel, num_layers = config.parallel_config, config.model_config.get_total_num_hidden_layers()
    stages = parallel.pipeline_parallel_size
    return ParallelShape(
        parallel.tensor_parallel_size,
        tuple(get_pp_indices(num_layers, stage, stages)[0] for stage in range(stages)),
    )


def build_layout(config: VllmConfig, cache: torch.Tensor) -> KvLayout:
    """Return the layout to compare with peers; `cache`: one layer, [block, head, token, state]."""
    model = config.model_config
    return KvLayout(
        model=f"{model.model}@{model.revision or ''}",
        dtype=_describe_dtype(config, cache),
        block_size=config.cache_config.block_size,
        num_layers=model.get_total_num_hidden_layers(),
        num_kv_heads=1 if model.use_mla else model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        arrangement=f"{tuple(cache.shape[2:])} {_describe_packing(config, cache)}".strip(),
        weights=read_weights_id(),
    )


def read_weights_id() -> str:
    """Return the digest of what this engine has loaded, from its agent; empty: it has none."""
    return os.environ.get(WEIGHTS_ENV, "")


def check_layout(
    shard: ShardSpec, layout: KvLayout, caches: Sequence[torch.Tensor], num_blocks: int
) -> None:
    """Raises ValueError when a rank's caches do not match its rank or have no usable layout."""
    fault = shard.shape.find_fault(layout.num_kv_heads)
    if fault:
        raise ValueError(f"{layout.model}: {fault}")
    shard.get_layer_indices(len(caches))
    heads = len(shard.shape.get_head_range(shard.rank, layout.num_kv_heads))
    for cache in caches:
        if cache.shape[0] != num_blocks:
            raise ValueError(
                f"the attention backend splits {num_blocks} blocks of {layout.block_size} tokens "
                f"into {cache.shape[0]}, which CleaveConnector does not support: set a smaller "
                "--block-size, or spec.engine.connector to Nixl (--connector nixl)"
            )
        if cache.dim() != 4 or cache.shape[1] != heads:
            raise ValueError(
                f"a KV cache of shape {tuple(cache.shape)} does not have {heads} heads: "
                "CleaveConnector cannot transfer it, set spec.engine.connector to Nixl"
            )


def find_layer_that_frees_blocks(spec: object) -> str:
    """Return the type of a layer that frees blocks of running requests, as sliding windows do;
    empty: there is none. `spec`: of the only KV cache group."""
    for layer in getattr(spec, "kv_cache_specs", {"": spec}).values():
        if type(layer) not in (FullAttentionSpec, MLAAttentionSpec):
            return type(layer).__name__
    return ""


def _describe_dtype(config: VllmConfig, cache: torch.Tensor) -> str:
    """Return the data type; caches of bytes do not say how vLLM reads them. Scales are part of the
    checkpoint, or lie beside each head's values and move with them."""
    name = str(cache.dtype)
    return name if cache.element_size() > 1 else f"{name} as {config.cache_config.cache_dtype}"


def _describe_packing(config: VllmConfig, cache: torch.Tensor) -> str:
    """Return the CPU instruction set of the attention kernel: it determines the order of keys."""
    if cache.device.type != "cpu":
        return ""
    model, kv = config.model_config, config.cache_config
    isa = cpu_attn._get_attn_isa(model.dtype, kv.block_size, model.get_head_size(), kv.cache_dtype)
    return str(isa)
