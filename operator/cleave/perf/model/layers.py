"""Layers that differ from plain ones: experts, latent attention, weights of fewer bits.

Read from a config.json for cleave.perf.model.model_shape. What is hard: every tool names the facts
of quantisation differently; unknown methods are refused, since a wrong guess is off by a factor of
four in memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cleave.perf.model.hf_config import ConfigFields, ModelConfigError
from cleave.perf.model.layer_kinds import LayerKind, LayerKinds

_SCALE_BITS = 16
"""Bits of the scale of a group of weights."""
_FP4_BITS, _FP8_BITS = 4, 8
_NVFP4_BITS = 4.5
"""A scale of 8 bits for 16 values."""
_ONE_SHARED_EXPERT = ("llama4", "llama4_text")
"""Model types that have one without a field for it."""
_SUPPORTED_METHODS = (
    "fp8, awq, gptq, bitsandbytes, compressed-tensors, mxfp4, modelopt with FP8 or NVFP4"
)


@dataclass(frozen=True, slots=True)
class Experts:
    """The mixture-of-experts layers; every expert is an MLP like the dense ones."""

    count: int
    per_token: int
    intermediate_size: int
    """Width of one expert."""
    shared_intermediate_size: int = 0
    """Width of the experts that every token uses, together; 0: none."""
    dense_layers: int = 0
    """Number of layers that have a dense MLP instead."""

    def count_activated(self, tokens: float) -> float:
        """Expected number of a layer's experts that `tokens` tokens use, with even routing."""
        untouched: float = (1 - self.per_token / self.count) ** tokens
        return self.count * (1 - untouched)


def read_experts(config: ConfigFields, dense_layers: int) -> Experts | None:
    """The expert layers of a model; None: every layer is dense. Raises ConfigError.

    Mixtral's experts are as wide as `intermediate_size`; DeepSeek and Qwen have
    `moe_intermediate_size`.
    """
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    count = config.get_optional_number(*names, least=0)
    if not count or count == 1:
        return None
    per_token = config.get_number("num_experts_per_tok", "num_experts_per_token")
    if per_token > count:
        remedy = f"write at most the {count} experts there are"
        raise config.build_error("num_experts_per_tok", remedy)
    width = config.get_number("moe_intermediate_size", "intermediate_size")
    return Experts(count, per_token, width, _read_shared_width(config, width), dense_layers)


def _read_shared_width(config: ConfigFields, width: int) -> int:
    """Width of the experts that every token uses; `width`: of one routed expert."""
    own = config.get_optional_number(
        *("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        *("shared_intermediate_size", "share_expert_dim"),
        least=0,
    )
    if own is not None:
        return own
    if config.get_text("model_type") in _ONE_SHARED_EXPERT:
        return width
    return width * (
        config.get_optional_number("n_shared_experts", "num_shared_experts", least=0) or 0
    )


def count_dense_mlps(config: ConfigFields, kinds: LayerKinds) -> int:
    """Number of layers with a dense MLP beside those with experts. Raises ConfigError."""
    if LayerKind.MLP in kinds.kinds:
        return kinds.dense_mlps
    layers = len(kinds.kinds)
    names = config.values.get("mlp_layer_types")
    if isinstance(names, Sequence) and not isinstance(names, str):
        return sum(name == "dense" for name in names[:layers])
    first = config.get_optional_number("first_k_dense_replace", "num_dense_layers", least=0)
    if first is not None:
        return min(first, layers)
    step = config.get_optional_number("decoder_sparse_step", "interleave_moe_layer_step") or 1
    only = config.values.get("mlp_only_layers")
    dense = len(only) if isinstance(only, Sequence) and not isinstance(only, str) else 0
    return min(layers, layers - layers // step + dense)


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
        Down-projections and the indexer are replicated on every GPU."""
        down = hidden_size * (self.cached_size + (self.q_rank or 0))
        up_query = heads * self.key_size * (self.q_rank or hidden_size)
        up_kv = heads * self.kv_rank * (self.nope_head_size + self.value_head_size)
        indexer = hidden_size * (self.index_head_size + self.index_heads)
        indexer += (self.q_rank or hidden_size) * self.index_heads * self.index_head_size
        own = down + up_query + up_kv + heads * self.value_head_size * hidden_size
        return own + (indexer if self.index_heads else 0)

    @property
    def indexer_bytes(self) -> int:
        """Bytes that the indexer caches per token and layer: its key in 8 bits, and a scale of 32
        bits for 128 values (vLLM 0.32, `DeepseekV32IndexerCache`)."""
        return self.index_head_size + self.index_head_size // 128 * 4


def read_latent_attention(config: ConfigFields) -> LatentAttention | None:
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
        index_heads=config.get_optional_number("index_n_heads") or 0,
        index_head_size=config.get_optional_number("index_head_dim") or 0,
    )


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Attention to the last tokens only, in some of the layers."""

    tokens: int
    """With chunked attention (Llama 4) the size of a chunk, which is the most that is kept."""
    layers: int
    """Number of layers that have it."""


def read_sliding_window(config: ConfigFields, kinds: LayerKinds) -> SlidingWindow | None:
    """The window of the layers that have one (gpt-oss, Gemma 3, Llama 4); None: every layer attends
    to the whole context. Raises ConfigError."""
    chunked, sliding = kinds.count(LayerKind.CHUNKED), kinds.count(LayerKind.SLIDING)
    field = "attention_chunk_size" if chunked else "sliding_window"
    tokens = config.get_optional_number(field)
    if tokens is None or not chunked + sliding:
        return None
    return SlidingWindow(tokens, chunked + sliding)


@dataclass(frozen=True, slots=True)
class Quantization:
    """Storage of linear layers in fewer bits; embeddings and LM head are not quantised."""

    method: str
    """The config's `quant_method`."""
    weight_bits: float
    """Bits of one weight, including its share of scales and zero points."""
    is_8_bit_compute: bool
    """Whether activations are quantised, too, so that matrix products run at the 8-bit rate."""
    is_integer: bool = False
    """Whether 8-bit products are of integers, which Blackwell computes slowly, not of FP8."""
    is_4_bit_compute: bool = False
    """Whether activations are quantised to 4 bits, too: NVFP4, where the GPU computes in it."""
    is_blockwise: bool = False
    """Whether blocks of weights have scales, as in DeepSeek's checkpoints."""
    is_experts_only: bool = False
    """Whether attention, router and shared parts keep `dtype_bytes`, as in gpt-oss."""


def read_quantization(config: ConfigFields) -> Quantization | None:
    """The quantisation of a model; None: weights are not quantised. Raises ConfigError."""
    part = config.get_object("quantization_config")
    if part is None or not part.values:
        return None
    method = (part.get_text("quant_method") or "").lower()
    match method:
        case "fp8":
            is_blockwise = part.values.get("weight_block_size") is not None
            return Quantization(method, 8, is_8_bit_compute=True, is_blockwise=is_blockwise)
        case "awq" | "gptq":
            bits = part.get_number("bits", "w_bit")
            # Each group has a scale and a zero point of the weights' own width.
            group = part.get_optional_number("group_size", "q_group_size", least=-1) or -1
            scales = (_SCALE_BITS + bits) / group if group > 0 else 0.0
            return Quantization(method, bits + scales, is_8_bit_compute=False)
        case "bitsandbytes":
            bits = 4 if part.get_flag("load_in_4bit", default=False) else 8
            # NF4: one 32-bit scale for 64 weights (Dettmers et al., QLoRA, section 3).
            return Quantization(method, 4.5 if bits == 4 else 8, is_8_bit_compute=False)
        case "mxfp4":
            # OCP Microscaling 1.0: 32 values share a scale of 8 bits.
            return Quantization(method, 4.25, is_8_bit_compute=False, is_experts_only=True)
        case "compressed-tensors":
            return _read_compressed_tensors(part)
        case "modelopt" if (part.get_text("quant_algo") or "").upper() == "FP8":
            return Quantization(method, 8, is_8_bit_compute=True)
        case "modelopt_fp4" | "modelopt" if (part.get_text("quant_algo") or "").upper() == "NVFP4":
            return Quantization(method, _NVFP4_BITS, is_8_bit_compute=False, is_4_bit_compute=True)
        case _:
            raise part.build_error("quant_method", f"known are {_SUPPORTED_METHODS}")


def _read_compressed_tensors(part: ConfigFields) -> Quantization:
    groups = part.get_object("config_groups")
    if groups is None or not groups.values:
        raise ModelConfigError(f"{part.path}config_groups is missing; it gives the weights' bits")
    group = groups.get_object(next(iter(groups.values)))
    weights = group.get_object("weights") if group else None
    if group is None or weights is None:
        raise ModelConfigError(f"{groups.path}*.weights is missing; it gives the weights' bits")
    bits = weights.get_number("num_bits")
    size = weights.get_optional_number("group_size", least=-1) or -1
    scales = _SCALE_BITS / size if size > 0 else 0.0
    activations = group.get_object("input_activations")
    has_equal_bits = activations is not None and activations.get_number("num_bits") == bits
    if has_equal_bits and bits == _FP4_BITS and weights.get_text("type") == "float":
        return Quantization("compressed-tensors", _NVFP4_BITS, False, is_4_bit_compute=True)
    return Quantization(
        "compressed-tensors",
        bits + scales,
        has_equal_bits and bits == _FP8_BITS,
        is_integer=weights.get_text("type") == "int",
        is_blockwise=weights.get_text("strategy") == "block",
    )


def has_8_bit_kv(config: ConfigFields) -> bool:
    """Whether the checkpoint has scales for KV of 8 bits, with which vLLM stores it so by itself:
    compressed-tensors' `kv_cache_scheme`, which newer ModelOpt writes, too, or its
    `kv_cache_quant_algo`. Raises ConfigError."""
    part = config.get_object("quantization_config")
    if part is None:
        return False
    scheme = part.values.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return scheme.get("num_bits") == _FP8_BITS and scheme.get("type") == "float"
    return (part.get_text("kv_cache_quant_algo") or "").upper() == "FP8"
