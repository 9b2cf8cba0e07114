"""Attention that differs from plain grouped queries: latents, windows, heads of other sizes.

Part of cleave.perf.model.shape; read from a config.json by cleave.perf.model.model_shape.
"""

from dataclasses import dataclass

from cleave.perf.model.hf_config import ConfigFields

_FP8_TILE = 128
"""Values of a latent in 8 bits that share a scale of 32 bits (vLLM 0.32, `fp8_ds_mla`)."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA; DeepSeek-V2, section 2.1): one compressed latent per token
    and layer is cached instead of keys and values, and the rotated part of the key, which all heads
    share, beside it."""

    kv_rank: int
    """Size of a latent."""
    rope_head_size: int
    """Size of the rotated part of the key."""
    nope_head_size: int
    """Size of the part of each head's key that is not rotated."""
    value_head_size: int
    q_rank: int | None
    """Size of the compressed query; None: queries are projected in one step."""
    index_heads: int = 0
    """Heads of the indexer that chooses the tokens to attend to (DeepSeek-V3.2); 0: there is
    none."""
    index_head_size: int = 0
    index_layers: int = 0
    """Number of layers that have an indexer; the others use the choice of one before them (GLM
    5.2)."""

    @property
    def key_size(self) -> int:
        """Key size of one head in prefill."""
        return self.nope_head_size + self.rope_head_size

    @property
    def cached_size(self) -> int:
        """Number of values cached per token and layer."""
        return self.kv_rank + self.rope_head_size

    def count_parameters(self, hidden_size: int, heads: float) -> float:
        """Weights of one layer's projections for `heads` heads, a GPU's share of all heads, without
        an indexer. Down-projections are replicated on every GPU."""
        down = hidden_size * (self.cached_size + (self.q_rank or 0))
        up_query = heads * self.key_size * (self.q_rank or hidden_size)
        up_kv = heads * self.kv_rank * (self.nope_head_size + self.value_head_size)
        return down + up_query + up_kv + heads * self.value_head_size * hidden_size

    def count_indexer_parameters(self, hidden_size: int) -> int:
        """Weights of one layer's indexer, which every GPU has."""
        width = self.index_heads * self.index_head_size
        keys = hidden_size * (self.index_head_size + self.index_heads)
        return keys + (self.q_rank or hidden_size) * width

    def compute_cached_bytes(self, dtype_bytes: int) -> int:
        """Bytes that one layer caches per token, without an indexer; `dtype_bytes`: of a value.
        Sparse attention keeps latents of 8 bits with a scale for each tile, and the rotated key in
        16 bits."""
        if dtype_bytes == 1 and self.index_heads:
            return self.kv_rank + self.kv_rank // _FP8_TILE * 4 + 2 * self.rope_head_size
        return self.cached_size * dtype_bytes

    @property
    def indexer_bytes(self) -> int:
        """Bytes that an indexer caches per token and layer: its key in 8 bits, and a scale of 32
        bits for 128 values (vLLM 0.32, `DeepseekV32IndexerCache`)."""
        return self.index_head_size + self.index_head_size // 128 * 4


def read_latent_attention(config: ConfigFields, layers: int) -> LatentAttention | None:
    """The latent attention of a model; None: it caches keys and values. Raises
    ModelConfigError."""
    kv_rank = config.get_optional_number("kv_lora_rank")
    if kv_rank is None:
        return None
    heads = config.get_optional_number("index_n_heads", least=0) or 0
    return LatentAttention(
        kv_rank=kv_rank,
        rope_head_size=config.get_number("qk_rope_head_dim"),
        nope_head_size=config.get_number("qk_nope_head_dim"),
        value_head_size=config.get_number("v_head_dim"),
        q_rank=config.get_optional_number("q_lora_rank"),
        index_heads=heads,
        index_head_size=config.get_number("index_head_dim") if heads else 0,
        index_layers=_count_indexers(config, layers) if heads else 0,
    )


def _count_indexers(config: ConfigFields, layers: int) -> int:
    """Layers with an indexer of their own: all, or some of each few (GLM 5.2)."""
    step = config.get_optional_number("index_topk_freq") or 1
    offset = config.get_optional_number("index_skip_topk_offset", least=0)
    first = 2 if offset is None else offset
    flags = [max(i - first + 1, 0) % step == 0 for i in range(layers)]
    pattern = config.get("index_topk_pattern")
    if isinstance(pattern, str):
        flags = [pattern[i : i + 1] != "S" for i in range(layers)]
    elif pattern is not None:
        raise config.build_error("index_topk_pattern", "write a letter for each layer")
    kinds = config.get_list("indexer_types")
    if kinds is not None and [*kinds[:layers]] != ["full" if each else "shared" for each in flags]:
        raise config.build_error("indexer_types", "write what the fields index_... say")
    return sum(flags)


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Attention to the last tokens only, in some of the layers."""

    tokens: int
    """With chunked attention (Llama 4) the size of a chunk, which is the most that is kept."""
    layers: int
    """Number of layers that have it."""


@dataclass(frozen=True, slots=True)
class WindowedAttention:
    """Layers with a sliding window whose heads are not those of the other layers (MiMo-V2,
    Gemma 4)."""

    tokens: int
    layers: int
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    uncached: int = 0
    """Of these layers, those that read the KV of earlier ones, and have no projections for it."""

    @property
    def cached(self) -> int:
        """Number of layers with KV of their own."""
        return self.layers - self.uncached

    def count_parameters(self, hidden_size: int, tensor: int) -> float:
        """Weights of all these layers' projections on one of `tensor` GPUs."""
        kv_heads = -(-self.kv_heads // tensor)
        heads = self.layers * self.heads / tensor + self.cached * kv_heads
        return hidden_size * (self.key_size + self.value_size) * heads

    def compute_layer_bytes(self, tensor: int, dtype_bytes: int) -> int:
        """Bytes of one token's KV in one layer on one of `tensor` GPUs."""
        return -(-self.kv_heads // tensor) * (self.key_size + self.value_size) * dtype_bytes


@dataclass(frozen=True, slots=True)
class MeasuredCaches:
    """Bytes that an engine has reported for its caches on one of `tensor` GPUs."""

    token_bytes: int
    """Of a token, over all layers without a window."""
    windows: tuple[tuple[int, int], ...]
    """(last tokens that are kept, bytes of one of them) of layers with a window."""
    state_bytes: int
    """Of a request's states, over all layers."""
    groups: int
    """Number of kinds of caches."""
    tensor: int

    def compute_share(self, tensor: int, kv_heads: int) -> float:
        """By what the bytes change with `tensor` GPUs, of a model with so many KV heads."""
        return -(-kv_heads // tensor) / -(-kv_heads // self.tensor)
