"""The part of a layer on one GPU of a tensor parallel group (Vidur, section 4.3).

A shard is a smaller layer, so one GPU alone can measure every size.
"""

from dataclasses import dataclass

from cleave.perf.model.model_shape import ModelShape


class ShardError(ValueError):
    """The model cannot be measured this way; one line with the reason."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One layer of `shape` on one of `size` GPUs."""

    shape: ModelShape
    size: int

    def __post_init__(self) -> None:
        """Raises ShardError for models that cannot be sharded or measured so."""
        shape = self.shape
        if shape.latent is not None:
            raise ShardError(f"{shape.name}: latent attention (MLA) is not measured yet")
        if shape.quantization is not None:
            raise ShardError(
                f"{shape.name}: quantised weights are not measured yet; name the model's original"
            )
        if shape.num_attention_heads % self.size:
            raise ShardError(
                f"{shape.name}: {shape.num_attention_heads} attention heads cannot be sharded over "
                f"{self.size} GPUs; leave that size out"
            )

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.shape.num_attention_heads // self.size

    @property
    def kv_heads(self) -> int:
        """Number of KV heads; replicated when there are fewer than GPUs."""
        return max(1, self.shape.num_kv_heads // self.size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of key and value of this layer."""
        return 2 * self.kv_heads * self.shape.head_size * self.shape.kv_dtype_bytes

    def get_mlp_width(self, width: int) -> int:
        """Return the width per GPU of an MLP that is `width` wide on all GPUs together."""
        return -(-width // self.size)
