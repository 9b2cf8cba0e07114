"""Multi-head latent attention (DeepSeek-V2, section 2.1), from a config.json.

Part of cleave.perf.model.
"""

from dataclasses import dataclass

from cleave.perf.hf_config import Fields


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """One compressed latent per token and layer is cached in place of every head's key and value.

    The rotated part of the key is shared by all heads and cached beside it.
    """

    kv_rank: int
    """Numbers in a latent."""
    rope_head_size: int
    """Part of the key that is rotated."""
    nope_head_size: int
    """Part of each head's key that is not."""
    value_head_size: int
    q_rank: int | None
    """None: queries are projected in one step."""

    @property
    def key_size(self) -> int:
        """Of one head, while a prompt is computed."""
        return self.nope_head_size + self.rope_head_size

    @property
    def cached_size(self) -> int:
        """Numbers cached per token and layer."""
        return self.kv_rank + self.rope_head_size

    def parameters(self, hidden_size: int, heads: float) -> float:
        """Projections of one layer for a GPU's share of heads; down-projections are replicated."""
        down = hidden_size * (self.cached_size + (self.q_rank or 0))
        up_query = heads * self.key_size * (self.q_rank or hidden_size)
        up_kv = heads * self.kv_rank * (self.nope_head_size + self.value_head_size)
        return down + up_query + up_kv + heads * self.value_head_size * hidden_size


def read(config: Fields) -> LatentAttention | None:
    """None: the model caches keys and values. Raises ConfigError."""
    kv_rank = config.optional_number("kv_lora_rank")
    if kv_rank is None:
        return None
    return LatentAttention(
        kv_rank=kv_rank,
        rope_head_size=config.number("qk_rope_head_dim"),
        nope_head_size=config.number("qk_nope_head_dim"),
        value_head_size=config.number("v_head_dim"),
        q_rank=config.optional_number("q_lora_rank"),
    )
