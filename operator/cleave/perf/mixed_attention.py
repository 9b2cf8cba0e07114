"""How much longer decoding takes beside prompts where one kernel of FlashAttention 2 serves both.

Called by cleave.perf.estimator for times from kernels and the roofline. Decoding alone, the kernel
treats the query heads that share a KV head as rows of one query, so that each context is read once
and is divided among multiprocessors. Beside a prompt every query head reads the context for itself
(vLLM's fork of FlashAttention, `seqlenq_ngroups_swapped` in csrc/flash_attn/flash_api.cpp). How
much of that the L2 cache hides depends on the batch.
"""

from dataclasses import replace

from cleave.perf.hardware.gpu import Gpu
from cleave.perf.model.model_shape import ModelShape
from cleave.perf.profile import operator_fit
from cleave.perf.timing import EngineTiming

READ_AGAIN = ((32, 0.25), (64, 0.32), (128, 0.52))
"""(batch, share of a query head's reads that are not hidden). Mean over the profiles of an RTX PRO
6000 in LLMServingSim (github.com/casys-kaist/LLMServingSim at 5daddb2, profiler/perf, MIT), with
groups of 4 and 8 heads; those of an RTX 4090 say 0.33, 0.46 and 0.83. Ampere was not measured."""
_FLASH_ATTENTION_2 = frozenset(
    {"A10", "A100", "A10G", "A30", "A40", "A800", "L20", "L4", "L40", "L40S", "RTX", "GB10"}
)
"""Compute capability 8.x and 12.x: there vLLM 0.32 chooses it, on Hopper FlashAttention 3 and on
server Blackwell FlashInfer, whose mixed iterations are not known."""


def scale_mixed(timing: EngineTiming, shape: ModelShape, gpu: Gpu, tensor: int) -> EngineTiming:
    """`timing` with the contexts of decoding beside prompts as on this GPU. Latent attention and KV
    in 8 bits have other kernels."""
    heads, kv_heads = shape.num_attention_heads / tensor, -(-shape.num_kv_heads // tensor)
    has_other = shape.latent is not None or shape.kv_dtype_bytes == 1 or heads <= kv_heads
    if has_other or gpu.name.split("-")[0] not in _FLASH_ATTENTION_2:
        return timing
    factors = [(batch, 1 + share * (heads / kv_heads - 1)) for batch, share in READ_AGAIN]
    mixed = operator_fit.scale_contexts(factors, timing.decode_context_ms)
    return replace(timing, mixed_context_ms=mixed)
