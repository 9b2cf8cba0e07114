"""Multi-head latent attention (DeepSeek-V2, section 2.1), from a config.json.

Part of cleave.perf.model.model_shape.
"""

from dataclasses import dataclass

from cleave.perf.model.hf_config import ConfigFields


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Instead of keys and values, one compressed latent is cached per token and layer.

    The rotated part of the key, which all heads share, is cached beside it.
    """

    kv_rank: int
    """Size of a latent."""
    rope_head_size: int
    """Size of the rotated part of the key."""
    nope_head_size: int
    """Size of the part of each head's key that is not rotated."""
    value_head_size: int
    q_rank: int | None
    """Size of the compressed query; None: queries are projected in one step."""

    @property
    def key_size(self) -> int:
        """Key size of one head in prefill."""
        return self.nope_head_size + self.rope_head_size

    @property
    def cached_size(self) -> int:
        """Number of values cached per token and layer."""
        return self.kv_rank + self.rope_head_size

    def count_parameters(self, hidden_size: int, heads: float) -> float:
        """Weights of one layer's projections for `heads` heads, a GPU's share of all heads.

        Down-projections are replicated on every GPU.
        """
        down = hidden_size * (self.cached_size + (self.q_rank or 0))
        up_query = heads * self.key_size * (self.q_rank or hidden_size)
        up_kv = heads * self.kv_rank * (self.nope_head_size + self.value_head_size)
        return down + up_query + up_kv + heads * self.value_head_size * hidden_size


def read(config: ConfigFields) -> LatentAttention | None:
    """The latent attention of a model; None: it caches keys and values. Raises ConfigError."""
    kv_rank = config.get_optional_number("kv_lora_rank")
    if kv_rank is None:
        return None
    return LatentAttention(
        kv_rank=kv_rank,
        rope_head_size=config.get_number("qk_rope_head_dim"),
        nope_head_size=config.get_number("qk_nope_head_dim"),
        value_head_size=config.get_number("v_head_dim"),
        q_rank=config.get_optional_number("q_lora_rank"),
    )
