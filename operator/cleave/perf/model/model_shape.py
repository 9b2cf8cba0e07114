"""Dimensions of a model, from its config.json or from the table of known models.

Used by the emulated engine (bytes of a KV transfer) and the planner (Vidur, section 4.1: a
declarative description from which operators and their sharding follow). Standard library only.
Norms and biases are neglected: they are under 0.1 % of the weights.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cleave.perf.model import hf_config, known_models, layers
from cleave.perf.model.hf_config import ConfigFields, ModelConfigError
from cleave.perf.model.layer_kinds import LayerKind, read_layer_kinds
from cleave.perf.model.layers import Experts, LatentAttention, Quantization, SlidingWindow
from cleave.perf.model.states import StateLayers, read_state_layers

_BYTES_OF_DTYPE = {"float32": 4, "float16": 2, "bfloat16": 2}
_WIDE_MLP_TYPES = {"bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt"}
"""Model types whose MLP is by default four times as wide as the model."""
_UNGATED_MLP = _WIDE_MLP_TYPES | {"gpt_neox", "nemotron_h", "opt", "phi", "starcoder2"}
"""Model types whose MLP has two matrices; all others have a third one, the gate."""
_TIED_EMBEDDINGS = {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "mpt", "opt"} | {
    *("gemma", "gemma2", "gemma3_text")
}
"""Model types that share embedding and LM head by default."""
_OUTPUT_GATES = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
"""Model types whose attention has a gate by default."""
_MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
_OPT_POSITION_OFFSET = 2
"""OPT's learned positions start at 2."""


_BYTES_OF_KV_DTYPE = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""By values of vLLM's `--kv-cache-dtype` that planning knows, besides auto."""
_FP8 = Quantization("fp8", 8, is_8_bit_compute=True)
_QUANTIZED_AT_LOAD = {
    **dict.fromkeys(("fp8", "fp8_per_tensor", "fp8_per_channel"), _FP8),
    "fp8_per_block": replace(_FP8, is_blockwise=True),
}
"""By values of vLLM's `--quantization` for checkpoints that are not quantised."""
_NAMES_OF_FP8_COPIES = {"fp8", "compressed-tensors"}
"""Copies of one model with weights in FP8 differ in what their config.json calls it, and the table
of known models has one name for all of them."""


class UnknownModelError(LookupError):
    """The model is neither in the table nor a folder with a usable config.json."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The dimensions of a decoder-only transformer."""

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_model_len: int
    """Longest context that the model supports, in tokens."""
    intermediate_size: int
    """Width of a dense layer's MLP."""
    dtype_bytes: int = 2
    """Bytes of an activation value, and of a weight that is not quantised."""
    kv_dtype_bytes: int = 2
    """Bytes of a value in the KV cache."""
    has_gated_mlp: bool = True
    has_tied_embeddings: bool = False
    learned_positions: int = 0
    """Rows of the table of learned positions; 0: positions are computed."""
    experts: Experts | None = None
    latent: LatentAttention | None = None
    quantization: Quantization | None = None
    sliding_window: SlidingWindow | None = None
    """Roofline and KV transfers count the whole context of these layers."""
    states: StateLayers | None = None
    """Layers with a state of constant size instead of KV."""
    layers_without_attention: int = 0
    """Layers that are only an MLP, or only experts (Nemotron-H)."""
    layers_without_mlp: int = 0
    has_output_gate: bool = False
    """Whether attention has a gate as wide as its queries (Qwen3-Next)."""
    stored_mtp_layers: int = 0
    """Layers of multi-token prediction in the checkpoint (DeepSeek-V3, section 2.2)."""
    mtp_layers: int = 0
    """Those of them that engines load; their weights and KV count, and no accepted tokens do."""

    def with_kv_dtype(self, name: str) -> "ModelShape":
        """A copy whose KV has the type that vLLM's `--kv-cache-dtype` names; auto: the checkpoint's
        own. Raises ValueError, which names the types that can be planned."""
        if name == "auto":
            return self
        if name not in _BYTES_OF_KV_DTYPE:
            known = ", ".join(_BYTES_OF_KV_DTYPE)
            raise ValueError(f"{name}: cannot be planned for; write auto, {known}")
        return replace(self, kv_dtype_bytes=_BYTES_OF_KV_DTYPE[name])

    def with_quantization(self, name: str) -> "ModelShape":
        """A copy with the weights that vLLM's `--quantization` names, converted when an engine
        loads the checkpoint; this one where `explain_unplanned` says why. Raises ValueError when
        the checkpoint has other quantised weights."""
        own = self.quantization
        if own is None:
            return replace(self, quantization=_QUANTIZED_AT_LOAD.get(name))
        is_alike = name.startswith(own.method) or own.method.startswith(name)
        if is_alike or {name, own.method} == _NAMES_OF_FP8_COPIES:
            return self
        raise ValueError(f"{name}: {self.name} has weights of {own.method} already; remove it")

    def with_speculation(self, config: str) -> "ModelShape":
        """A copy with the layers of multi-token prediction if vLLM's `--speculative-config` asks
        for them; this one with other methods. Raises ValueError when there are none."""
        try:
            method = json.loads(config)["method"]
        except (ValueError, TypeError, LookupError, RecursionError):
            # Without a method vLLM derives it from the draft's own config.
            return self
        if method != "mtp" and not str(method).endswith("_mtp"):
            return self
        if not self.stored_mtp_layers:
            fields = " or ".join(_MTP_FIELDS)
            raise ValueError(f"{method}: {self.name} states no {fields} in its config; remove it")
        return replace(self, mtp_layers=self.stored_mtp_layers)

    def explain_unplanned(self, quantization: str) -> str | None:
        """Why plans do not count with this value of vLLM's `--quantization`; None: they do."""
        if self.quantization is not None or quantization in _QUANTIZED_AT_LOAD:
            return None
        known = ", ".join(_QUANTIZED_AT_LOAD)
        return (
            f"{quantization}: plans count with weights of {8 * self.dtype_bytes} bits; write "
            f"{known}, or give the folder of a quantised checkpoint as spec.model"
        )

    @property
    def parameters(self) -> int:
        """Number of weights; tied embeddings count once."""
        return self._table_parameters + self._sum_over_layers(self._count_stored_mlp_parameters())

    @property
    def active_parameters(self) -> int:
        """Number of weights that one token uses, with embedding and LM head (as in model names)."""
        return self._table_parameters + self._sum_over_layers(self._count_active_mlp_parameters())

    @property
    def embedding_parameters(self) -> int:
        """Weights of the tables of tokens and learned positions."""
        return (self.vocab_size + self.learned_positions) * self.hidden_size

    @property
    def lm_head_parameters(self) -> int:
        """Weights of the LM head, which may be the embedding's."""
        return self.vocab_size * self.hidden_size

    @property
    def attention_layers(self) -> int:
        """Number of layers with KV."""
        return self.num_layers - self.layers_without_attention - self._state_layers

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self._mlp_layers - self.experts.dense_layers if self.experts else 0

    @property
    def dense_mlp_layers(self) -> int:
        """Number of layers with a dense MLP."""
        return self._mlp_layers - self.expert_layers

    @property
    def has_one_kind_of_cache(self) -> bool:
        """Whether all layers keep the same for a token: no windows, no states, no indexer."""
        has_indexer = self.latent is not None and self.latent.index_heads > 0
        return self.sliding_window is None and self.states is None and not has_indexer

    @property
    def has_plain_layers(self) -> bool:
        """Whether each layer consists of attention and an MLP, as kernel tables assume."""
        others = self.layers_without_attention or self.layers_without_mlp or self.has_output_gate
        return self.states is None and not others

    def count_attention_parameters(self, tensor: int = 1) -> int:
        """Weights of attention's projections on one of `tensor` GPUs in a mean layer; with state
        layers, of theirs. KV heads are replicated if there are fewer than GPUs; so are MLA's
        down-projections."""
        own = self._count_own_attention_parameters(tensor)
        if self.has_plain_layers:
            return round(own)
        states = self.states.layers * self.states.parameters / tensor if self.states else 0
        return round((self.attention_layers * own + states) / self.num_layers)

    def _count_own_attention_parameters(self, tensor: int) -> float:
        own_heads = self.num_attention_heads / tensor
        if self.latent is not None:
            return self.latent.count_parameters(self.hidden_size, own_heads)
        own_kv_heads = -(-self.num_kv_heads // tensor)
        gate = own_heads if self.has_output_gate else 0
        return self.hidden_size * self.head_size * (2 * (own_heads + own_kv_heads) + gate)

    @property
    def _state_layers(self) -> int:
        return self.states.layers if self.states else 0

    @property
    def _mlp_layers(self) -> int:
        return self.num_layers - self.layers_without_mlp

    def count_mlp_parameters(self, width: int) -> int:
        """Weights of an MLP of this inner width: of a dense layer, an expert or shared experts."""
        return (3 if self.has_gated_mlp else 2) * self.hidden_size * width

    @property
    def bytes_per_weight(self) -> float:
        """Bytes per weight of linear layers; embeddings and LM head have `dtype_bytes`."""
        return self.quantization.weight_bits / 8 if self.quantization else self.dtype_bytes

    @property
    def bytes_per_attention_weight(self) -> float:
        """The same for attention's projections, which some models do not quantise."""
        is_plain = self.quantization is not None and self.quantization.is_experts_only
        return self.dtype_bytes if is_plain and self.experts else self.bytes_per_weight

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as stored; tied embeddings count once."""
        attention = self.num_layers * self.count_attention_parameters()
        mlps = self.parameters - self._table_parameters - attention
        in_layers = attention * self.bytes_per_attention_weight + mlps * self.bytes_per_weight
        return (
            round(self._table_parameters * self.dtype_bytes + in_layers) + self.compute_mtp_bytes()
        )

    def compute_mtp_bytes(self, tensor: int = 1) -> int:
        """Bytes of the layers of multi-token prediction on one of `tensor` GPUs: each a layer of
        attention and experts, and the projection that joins its inputs, which every GPU keeps.
        Embedding and LM head are the model's own."""
        attention = self._count_own_attention_parameters(tensor) * self.bytes_per_attention_weight
        dense, sparse = self.count_layer_mlp_parameters(tensor)
        joined = 2 * self.hidden_size**2 * self.dtype_bytes
        own = attention + (sparse or dense) * self.bytes_per_weight + joined
        return round(self.mtp_layers * own)

    @property
    def _table_parameters(self) -> int:
        """Weights of embeddings and LM head; tied ones count once."""
        head = 0 if self.has_tied_embeddings else self.lm_head_parameters
        return self.embedding_parameters + head

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all attention layers, as long as it is in their
        windows; with MLA latent and rotated key, and the indexer's key."""
        return (self.attention_layers + self.mtp_layers) * self._compute_layer_kv_bytes(1)

    def compute_kv_bytes_on_gpu(self, tensor: int, pipeline: int) -> int:
        """The same on one GPU of the stage with the most layers. KV heads are replicated if there
        are fewer than GPUs; MLA's latent is always replicated."""
        layers = self.attention_layers + self.mtp_layers
        return -(-layers // pipeline) * self._compute_layer_kv_bytes(tensor)

    def compute_context_bytes_on_gpu(self, tokens: int, tensor: int = 1, pipeline: int = 1) -> int:
        """Bytes that a request with a context of `tokens` keeps on such a GPU: KV, in layers with a
        window of the last tokens only, and states, which do not grow."""
        window = self.sliding_window
        windowed = window.layers if window else 0
        kept = min(tokens, window.tokens) if window else 0
        layers = self.attention_layers + self.mtp_layers
        layer_tokens = (layers - windowed) * tokens + windowed * kept
        own = layer_tokens * self._compute_layer_kv_bytes(tensor)
        return -(-(own + self.compute_state_bytes(tensor)) // pipeline)

    def compute_state_bytes(self, tensor: int = 1) -> int:
        """Bytes of one request's states on one of `tensor` GPUs, over all state layers."""
        if self.states is None:
            return 0
        per_layer = self.states.compute_bytes(self.dtype_bytes)
        return -(-self.states.layers * per_layer // tensor)

    @property
    def flops_per_token(self) -> float:
        """FLOPs of the linear layers for one token, two per weight; no LM head, no attention."""
        return 2.0 * self._sum_over_layers(self._count_active_mlp_parameters())

    @property
    def prefill_attention_flops(self) -> float:
        """FLOPs for one pair of a token and an earlier one, over all layers and heads. They are for
        scores and values; a prompt of n tokens has about n^2 / 2 pairs."""
        key, value = self.head_size, self.head_size
        if self.latent is not None:
            key, value = self.latent.key_size, self.latent.value_head_size
        return 2.0 * self.attention_layers * self.num_attention_heads * (key + value)

    @property
    def decode_attention_flops(self) -> float:
        """The same in decode, where MLA attends directly to the latents (absorbed weights)."""
        if self.latent is None:
            return self.prefill_attention_flops
        width = self.latent.cached_size + self.latent.kv_rank
        return 2.0 * self.attention_layers * self.num_attention_heads * width

    @property
    def shardable_kv_heads(self) -> int | None:
        """KV heads that limit which tensor sizes pair; None: none do. MLA's latent is replicated,
        and beside states vLLM's NixlConnector transfers copies of heads."""
        return self.num_kv_heads if self.latent is None and self.states is None else None

    def list_windows(self) -> tuple[tuple[int, int], ...]:
        """(tokens of the sliding window, layers that have it); 0 tokens: the whole context."""
        if self.sliding_window is None:
            return ((0, self.attention_layers),)
        window = self.sliding_window
        return (window.tokens, window.layers), (0, self.attention_layers - window.layers)

    def count_layers_per_stage(self, pipeline: int) -> int:
        """Layers of the largest of `pipeline` stages."""
        return -(-self.num_layers // pipeline)

    def explain_unsupported(
        self, tensor: int, pipeline: int, data: int = 1, *, expert: bool = False
    ) -> str | None:
        """Why the model cannot be sharded over `tensor` x `pipeline` GPUs of each of `data` ranks;
        None: it can. `expert`: experts are distributed as wholes. The rules are vLLM's;
        cleave.perf.hardware.memory checks the memory."""
        if self.experts is None and (data > 1 or expert):
            return "it has no experts, and without them data-parallel ranks are separate instances"
        if self.experts is not None and (reason := self._explain_shares(tensor * data, expert)):
            return reason
        if tensor < 1 or pipeline < 1:
            return f"parallel sizes {tensor} x {pipeline} are below 1"
        if self.num_attention_heads % tensor:
            return f"{self.num_attention_heads} attention heads cannot be shared by {tensor} GPUs"
        more, fewer = max(tensor, self.num_kv_heads), min(tensor, self.num_kv_heads)
        if self.latent is None and more % fewer:
            return f"{self.num_kv_heads} KV heads cannot be shared by {tensor} GPUs"
        if self.states is not None and self.states.heads % tensor:
            return f"state layers of {self.states.heads} heads cannot be shared by {tensor} GPUs"
        has_dense = self.experts is None or self.experts.dense_layers
        if has_dense and self.intermediate_size % tensor:
            return f"an MLP of width {self.intermediate_size} cannot be shared by {tensor} GPUs"
        if pipeline > self.num_layers:
            return f"{self.num_layers} layers cannot fill {pipeline} pipeline stages"
        return None

    def count_layer_mlp_parameters(self, tensor: int = 1, data: int = 1) -> tuple[int, int]:
        """MLP weights on one of `tensor` GPUs of each of `data` ranks, which share the experts: (of
        a dense layer, of a mixture-of-experts layer). The second is 0 if the model has none."""
        dense, sparse = self._count_stored_mlp_parameters(data)
        return dense // tensor, sparse // tensor

    def _explain_shares(self, gpus: int, is_whole: bool) -> str | None:
        """Why so many GPUs cannot share the experts of a layer, as wholes or each of them."""
        assert self.experts is not None
        count, width = self.experts.count, self.experts.intermediate_size
        if is_whole:
            return f"{count} experts do not suffice for {gpus} GPUs" if count < gpus else None
        return f"an MLP of width {width} cannot be shared by {gpus} GPUs" if width % gpus else None

    def _count_stored_mlp_parameters(self, data: int = 1) -> tuple[int, int]:
        dense = self.count_mlp_parameters(self.intermediate_size)
        if self.experts is None:
            return dense, 0
        router = self.hidden_size * self.experts.count
        own = self.experts.count * self.count_mlp_parameters(self.experts.intermediate_size) // data
        shared = self.count_mlp_parameters(self.experts.shared_intermediate_size)
        return dense, own + shared + router

    def _count_active_mlp_parameters(self) -> tuple[int, int]:
        dense, sparse = self._count_stored_mlp_parameters()
        if self.experts is None:
            return dense, 0
        idle = self.experts.count - self.experts.per_token
        return dense, sparse - idle * self.count_mlp_parameters(self.experts.intermediate_size)

    def _sum_over_layers(self, mlp: tuple[int, int]) -> int:
        """Attention and MLP weights of all layers; `mlp`: (of a dense, of an expert layer)."""
        mlps = self.dense_mlp_layers * mlp[0] + self.expert_layers * mlp[1]
        return self.num_layers * self.count_attention_parameters() + mlps

    def _compute_layer_kv_bytes(self, tensor: int) -> int:
        """Bytes of one token's KV in one layer on one of `tensor` GPUs."""
        if self.latent is not None:
            cached = self.latent.cached_size * self.kv_dtype_bytes
            return cached + self.latent.indexer_bytes
        return 2 * -(-self.num_kv_heads // tensor) * self.head_size * self.kv_dtype_bytes


def load_shape(model: str) -> ModelShape:
    """The shape of a folder with a config.json, of such a file, or of a known model by name. Raises
    UnknownModelError, which names the missing or wrong field."""
    path = Path(model)
    if path.is_dir() or path.is_file():
        file = path / "config.json" if path.is_dir() else path
        try:
            return _build_shape(file.absolute().parent.name, hf_config.read_config(file))
        except ModelConfigError as error:
            raise UnknownModelError(f"{file}: {error}") from error
    found = known_models.find_config(model)
    if found is None:
        raise UnknownModelError(
            f"{model!r} is neither a folder with a config.json nor a known model; give a folder "
            "that holds only its config.json to plan it (hf download MODEL config.json --local-dir "
            f"FOLDER); known: {', '.join(known_models.CONFIGS)}"
        )
    return from_config(*found)


def from_config(name: str, config: Mapping[str, object]) -> ModelShape:
    """The shape of a decoded config.json. Raises UnknownModelError."""
    try:
        return _build_shape(name, hf_config.select_language_part(config))
    except ModelConfigError as error:
        raise UnknownModelError(f"{name}: {error}") from error


def _build_shape(name: str, config: ConfigFields) -> ModelShape:
    if config.get_flag("is_encoder_decoder", default=False):
        raise config.build_error("is_encoder_decoder", "only decoder-only models are served")
    model_type = config.get_text("model_type") or ""
    hidden = config.get_number("hidden_size", "n_embd", "n_embed", "d_model")
    heads = config.get_number("num_attention_heads", "n_head", "n_heads")
    positions = (
        *("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
        "model_max_length",
    )
    longest = config.get_number(*positions)
    dtype_bytes, kinds = _read_dtype_bytes(config), read_layer_kinds(config)
    dense_layers = layers.count_dense_mlps(config, kinds)
    without_attention = kinds.count(LayerKind.MLP)
    is_tied = config.get_flag("tie_word_embeddings", default=model_type in _TIED_EMBEDDINGS)
    latent = layers.read_latent_attention(config)
    return ModelShape(
        name=name,
        num_layers=len(kinds.kinds),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_kv_heads=_read_kv_heads(config, heads),
        head_size=latent.key_size if latent else _read_head_size(config, hidden, heads),
        vocab_size=config.get_number("vocab_size"),
        max_model_len=longest,
        intermediate_size=_read_intermediate_size(config, model_type, hidden),
        dtype_bytes=dtype_bytes,
        kv_dtype_bytes=1 if layers.has_8_bit_kv(config) else dtype_bytes,
        has_gated_mlp=model_type not in _UNGATED_MLP,
        has_tied_embeddings=is_tied,
        learned_positions=longest + _OPT_POSITION_OFFSET if model_type == "opt" else 0,
        experts=layers.read_experts(config, dense_layers),
        latent=latent,
        quantization=layers.read_quantization(config),
        sliding_window=layers.read_sliding_window(config, kinds),
        states=read_state_layers(config, kinds.count(LayerKind.RECURRENT), dtype_bytes),
        layers_without_attention=without_attention,
        layers_without_mlp=len(kinds.kinds) - without_attention if without_attention else 0,
        stored_mtp_layers=config.get_optional_number(*_MTP_FIELDS, least=0) or 0,
        has_output_gate=config.get_flag("attn_output_gate", default=model_type in _OUTPUT_GATES),
    )


def _read_dtype_bytes(config: ConfigFields) -> int:
    dtype = config.get_text("dtype", "torch_dtype") or "float16"
    if dtype not in _BYTES_OF_DTYPE:
        field = "dtype" if config.values.get("dtype") else "torch_dtype"
        raise config.build_error(field, f"write one of {', '.join(_BYTES_OF_DTYPE)}")
    return _BYTES_OF_DTYPE[dtype]


def _read_kv_heads(config: ConfigFields, heads: int) -> int:
    if config.get_flag("multi_query", default=False):
        # Falcon's second generation has this flag, too, although it uses grouped queries.
        is_grouped = config.get_flag("new_decoder_architecture", default=False)
        return config.get_number("num_kv_heads") if is_grouped else 1
    names = ("num_key_value_heads", "num_kv_heads")
    kv_heads = config.get_optional_number(*names) or heads
    if heads % kv_heads:
        field = next(name for name in names if config.values.get(name) is not None)
        raise config.build_error(field, f"the {heads} attention heads must be a multiple of it")
    return kv_heads


def _read_head_size(config: ConfigFields, hidden: int, heads: int) -> int:
    head_size = config.get_optional_number("head_dim", "kv_channels")
    if head_size is None and hidden % heads:
        raise config.build_error("head_dim", f"set it: {heads} heads do not divide {hidden} evenly")
    return head_size or hidden // heads


def _read_intermediate_size(config: ConfigFields, model_type: str, hidden: int) -> int:
    names = ("intermediate_size_mlp", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
    if model_type in _WIDE_MLP_TYPES:
        return config.get_optional_number(*names) or 4 * hidden
    # Models whose layers all have experts may state only theirs.
    width = config.get_optional_number(*names) or config.get_optional_number(
        "moe_intermediate_size"
    )
    width = width or config.get_number(*names[1:])
    # The first Qwen counts both halves of its gated MLP.
    return width // 2 if model_type == "qwen" else width
