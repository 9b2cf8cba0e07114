"""Attention of one layer: prompt chunks and decoding (Vidur, section 4.3).

Prompts run torch's fused kernel. Decoding runs two products and a softmax over contiguous KV, which
reads every key and value once, as paged kernels do; it is bound by that reading.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from cleave_worker.profiler.clock import RunOperator
from cleave_worker.profiler.linear import DeviceSpec
from cleave_worker.profiler.shard import Shard


@dataclass(frozen=True, slots=True)
class AttentionOperator:
    """Attention of one layer of a shard."""

    shard: Shard
    device_spec: DeviceSpec

    def build_prefill(self, tokens: int, cached_tokens: int) -> RunOperator:
        """Build the attention of a prompt chunk of `tokens` after `cached_tokens` computed ones."""
        shard, size = self.shard, self.shard.shape.head_size
        total = cached_tokens + tokens
        q = self.device_spec.make_tensor(1, shard.heads, tokens, size)
        k, v = (self.device_spec.make_tensor(1, shard.kv_heads, total, size) for _ in range(2))
        # Each row attends to the cached tokens and to those of the chunk up to itself.
        mask = causal_lower_right(tokens, total) if cached_tokens else None
        is_grouped = shard.heads != shard.kv_heads
        return lambda _: functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped
        )

    def build_decode(self, batch: int, context_tokens: int) -> RunOperator:
        """Build the attention of one token each of `batch` requests with `context_tokens` each."""
        shard, size = self.shard, self.shard.shape.head_size
        group = shard.heads // shard.kv_heads
        q = self.device_spec.make_tensor(batch * shard.kv_heads, group, size)
        k = self.device_spec.make_copies(batch * shard.kv_heads, context_tokens, size)
        v = self.device_spec.make_copies(batch * shard.kv_heads, context_tokens, size)

        def run(index: int) -> object:
            keys, values = k[index % len(k)], v[index % len(v)]
            weights = torch.softmax(q @ keys.transpose(1, 2) * size**-0.5, dim=-1)
            return weights @ values

        return run
