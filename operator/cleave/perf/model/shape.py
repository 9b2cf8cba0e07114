"""Dimensions of a model, and what follows from them: weights, caches, FLOPs, how it can be sharded.

Used by the emulated engine (bytes of a KV transfer) and the planner (Vidur, section 4.1: a
declarative description from which operators and their sharding follow); shapes are built by
cleave.perf.model.model_shape. Standard library only. Norms and biases are neglected: they are
under 0.5 % of the weights.
"""

import json
import math
from dataclasses import dataclass, replace

from cleave.perf.model.attention import (
    LatentAttention,
    MeasuredCaches,
    SlidingWindow,
    WindowedAttention,
)
from cleave.perf.model.experts import Experts
from cleave.perf.model.quantization import Quantization, WeightPart
from cleave.perf.model.states import StateLayers

MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
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
    value_head_size: int = 0
    """Of one head's value, where it is not that of its key (`head_size`); 0: it is."""
    dtype_bytes: int = 2
    """Bytes of an activation value, and of a weight that is not quantised."""
    kv_dtype_bytes: int = 2
    """Bytes of a value in the KV cache."""
    has_gated_mlp: bool = True
    has_tied_embeddings: bool = False
    learned_positions: int = 0
    """Rows of the table of learned positions; 0: positions are computed."""
    layer_table_parameters: int = 0
    """Weights of tables that layers look tokens up in (Gemma 4's per-layer embeddings)."""
    layer_parameters: int = 0
    """Weights of each layer beside attention and MLP."""
    experts: Experts | None = None
    latent: LatentAttention | None = None
    quantization: Quantization | None = None
    sliding_window: SlidingWindow | None = None
    """Roofline and KV transfers count the whole context of these layers."""
    windowed: WindowedAttention | None = None
    """Layers with a window whose heads are others than those above."""
    layers_without_cache: int = 0
    """Layers with the heads above that read the KV of earlier ones, and have no projections for it
    (Gemma 4)."""
    states: StateLayers | None = None
    """Layers with a state of constant size instead of KV."""
    measured: MeasuredCaches | None = None
    """Caches as an engine has reported them, which count instead of those computed here."""
    layers_without_attention: int = 0
    """Layers that are only an MLP, or only experts (Nemotron-H)."""
    layers_with_both: int = 0
    """Layers with attention and a state side by side (Falcon-H1)."""
    layers_without_mlp: int = 0
    has_output_gate: bool = False
    """Whether attention has a gate as wide as its queries (Qwen3-Next)."""
    norms_all_heads: bool = False
    """Whether queries and keys are normed over all heads, whose sums GPUs exchange in each layer
    (MiniMax-M2)."""
    has_encoders: bool = False
    """Whether the checkpoint has encoders of pictures or sound beside it. Their weights are not
    counted."""
    stored_mtp_layers: int = 0
    """Layers of multi-token prediction in the checkpoint (DeepSeek-V3, section 2.2)."""
    mtp_layers: int = 0
    """Those of them that engines load; their weights and KV count, and no accepted tokens do."""

    def with_kv_dtype(self, name: str) -> "ModelShape":
        """A copy whose KV has the type that vLLM's `--kv-cache-dtype` names; auto: the checkpoint's
        own. Raises ValueError, which names the types that can be planned."""
        if name == "auto" or self.measured is not None:
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
        if self.measured is not None:
            return self
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
        is_mtp = method == "mtp" or str(method).endswith("_mtp")
        if not is_mtp or self.measured is not None:
            return self
        if not self.stored_mtp_layers:
            fields = " or ".join(MTP_FIELDS)
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
        """Weights of the tables of tokens and learned positions, and of those of the layers."""
        rows = self.vocab_size + self.learned_positions
        return rows * self.hidden_size + self.layer_table_parameters

    @property
    def lm_head_parameters(self) -> int:
        """Weights of the LM head, which may be the embedding's."""
        return self.vocab_size * self.hidden_size

    @property
    def attention_layers(self) -> int:
        """Number of layers with attention."""
        others = self.layers_without_attention + self._state_layers - self.layers_with_both
        return self.num_layers - others

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return self._mlp_layers - self.experts.dense_layers if self.experts else 0

    @property
    def dense_mlp_layers(self) -> int:
        """Number of layers with a dense MLP."""
        return self._mlp_layers - self.expert_layers

    @property
    def keeps_whole_contexts(self) -> bool:
        """Whether what a request keeps is in proportion to its tokens: no windows, no states."""
        has_window = (
            self.sliding_window or self.windowed or (self.measured and self.measured.windows)
        )
        return not has_window and not self.has_states

    @property
    def has_states(self) -> bool:
        """Whether some layers have a state of constant size."""
        return self.states is not None or bool(self.measured and self.measured.state_bytes)

    @property
    def has_one_kind_of_cache(self) -> bool:
        """Whether all layers keep the same for a token: no windows, no states, no indexer."""
        has_others = self._count_indexers() or self.layers_without_cache
        if self.measured is not None:
            has_others = self.measured.groups > 1
        return self.keeps_whole_contexts and not has_others

    @property
    def has_plain_layers(self) -> bool:
        """Whether each layer consists of attention and an MLP, as kernel tables assume."""
        others = self.layers_without_attention or self.layers_without_mlp or self.has_output_gate
        sizes = self.value_head_size or (self.experts is not None and self.experts.latent_size)
        heads = self.windowed or self.measured
        return self.states is None and not heads and not others and not sizes

    def count_attention_parameters(self, tensor: int = 1) -> int:
        """Weights of attention's projections on one of `tensor` GPUs in a mean layer; with state
        layers, of theirs. KV heads are replicated if there are fewer than GPUs; so are MLA's
        down-projections."""
        own = self._count_own_attention_parameters(tensor)
        indexers = 0
        if self.latent is not None:
            indexer = self.latent.count_indexer_parameters(self.hidden_size)
            indexers = self.latent.index_layers * indexer
        states = self.states.layers * self.states.parameters / tensor if self.states else 0
        layers, other = self.attention_layers, 0.0
        if self.windowed is not None:
            layers -= self.windowed.layers
            other = self.windowed.count_parameters(self.hidden_size, tensor)
        sizes = self.head_size + self.value_size
        unused = -(-self.num_kv_heads // tensor) * sizes * self.hidden_size
        other -= self.layers_without_cache * unused
        every = (layers * own + other + states + indexers) / self.num_layers
        return round(every + self.layer_parameters)

    def _count_own_attention_parameters(self, tensor: int) -> float:
        own_heads = self.num_attention_heads / tensor
        if self.latent is not None:
            return self.latent.count_parameters(self.hidden_size, own_heads)
        own_kv_heads = -(-self.num_kv_heads // tensor)
        gate = own_heads * self.head_size if self.has_output_gate else 0
        sizes = self.head_size + self.value_size
        return self.hidden_size * (sizes * (own_heads + own_kv_heads) + gate)

    @property
    def value_size(self) -> int:
        """Size of one head's value."""
        return self.value_head_size or self.head_size

    @property
    def _state_layers(self) -> int:
        return self.states.layers if self.states else 0

    @property
    def _mlp_layers(self) -> int:
        return self.num_layers - self.layers_without_mlp

    def count_mlp_parameters(self, width: int) -> int:
        """Weights of an MLP of this inner width: of a dense layer, or shared experts."""
        return self._mlp_matrices * self.hidden_size * width

    def count_expert_parameters(self) -> int:
        """Weights of one routed expert; 0: there are none."""
        if self.experts is None:
            return 0
        size = self.experts.latent_size or self.hidden_size
        return self._mlp_matrices * size * self.experts.intermediate_size

    @property
    def _mlp_matrices(self) -> int:
        return 3 if self.has_gated_mlp else 2

    def get_bytes_per_weight(self, part: WeightPart) -> float:
        """Bytes per weight of a part; embeddings have `dtype_bytes`."""
        bits = self.quantization.get_bits(part) if self.quantization else None
        return self.dtype_bytes if bits is None else bits / 8

    @property
    def bytes_per_weight(self) -> float:
        """The same for most weights: of experts, or else of MLPs."""
        return self.get_bytes_per_weight(WeightPart.EXPERTS if self.experts else WeightPart.MLP)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights as stored; tied embeddings count once."""
        dense, sparse = self.compute_layer_mlp_bytes()
        mlps = self.dense_mlp_layers * dense + self.expert_layers * sparse
        head = 0.0 if self.has_tied_embeddings else self.compute_lm_head_bytes()
        tables = self.embedding_parameters * self.dtype_bytes + head
        attention = self.num_layers * self.compute_attention_weight_bytes()
        return round(tables + attention + mlps) + self.compute_mtp_bytes()

    def compute_lm_head_bytes(self) -> float:
        """Bytes of the LM head, of its own or the embedding's."""
        return self.lm_head_parameters * self.get_bytes_per_weight(WeightPart.LM_HEAD)

    def compute_attention_weight_bytes(self, tensor: int = 1) -> float:
        """Bytes of attention's weights, and those of states, on one of `tensor` GPUs in a mean
        layer."""
        states = self._state_layers * self.states.parameters / tensor if self.states else 0.0
        states /= self.num_layers
        own = self.count_attention_parameters(tensor) - states
        return own * self.get_bytes_per_weight(WeightPart.ATTENTION) + states * (
            self.get_bytes_per_weight(WeightPart.STATES)
        )

    def compute_layer_mlp_bytes(self, tensor: int = 1, data: int = 1) -> tuple[float, float]:
        """Bytes of an MLP's weights on one of `tensor` GPUs of each of `data` ranks, which share
        the experts: (of a dense layer, of a mixture-of-experts layer)."""
        dense = self.count_mlp_parameters(self.intermediate_size) / tensor
        dense *= self.get_bytes_per_weight(WeightPart.MLP)
        if self.experts is None:
            return dense, 0.0
        count = self.experts.count // data if data > 1 else self.experts.count
        own = count * self.count_expert_parameters() * self.get_bytes_per_weight(WeightPart.EXPERTS)
        shared = self.count_mlp_parameters(self.experts.shared_intermediate_size)
        routing = self._count_routing_parameters() * self.dtype_bytes
        return dense, (
            own + shared * self.get_bytes_per_weight(WeightPart.SHARED)
        ) / tensor + routing

    def compute_mtp_bytes(self, tensor: int = 1) -> int:
        """Bytes of the layers of multi-token prediction on one of `tensor` GPUs: each a layer of
        attention and experts, and the projection that joins its inputs, which every GPU keeps.
        Embedding and LM head are the model's own."""
        if not self.mtp_layers:
            return 0
        attention = self._count_own_attention_parameters(tensor)
        if self.latent is not None and self.latent.index_heads:
            attention += self.latent.count_indexer_parameters(self.hidden_size)
        attention *= self.get_bytes_per_weight(WeightPart.ATTENTION)
        dense, sparse = self.compute_layer_mlp_bytes(tensor)
        joined = 2 * self.hidden_size**2 * self.dtype_bytes
        return round(self.mtp_layers * (attention + (sparse or dense) + joined))

    @property
    def _table_parameters(self) -> int:
        """Weights of embeddings and LM head; tied ones count once."""
        head = 0 if self.has_tied_embeddings else self.lm_head_parameters
        return self.embedding_parameters + head

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values over all attention layers but those of `windowed`,
        as long as it is in their windows; with MLA latent and rotated key, and indexers' keys."""
        return self._compute_kv_bytes(1, 1)

    @property
    def copied_bytes_per_token(self) -> int:
        """The same with the layers of `windowed`: what a copy of a block holds per token."""
        return self.kv_bytes_per_token + self._compute_windowed_bytes(1)

    def compute_kv_bytes_on_gpu(self, tensor: int, pipeline: int) -> int:
        """`kv_bytes_per_token` on one GPU of the stage with the most layers. KV heads are
        replicated if there are fewer than GPUs; MLA's latent is always replicated."""
        return self._compute_kv_bytes(tensor, pipeline)

    def compute_copied_bytes_on_gpu(self, tensor: int) -> int:
        """`copied_bytes_per_token` on one of `tensor` GPUs."""
        return self._compute_kv_bytes(tensor, 1) + self._compute_windowed_bytes(tensor)

    def _compute_kv_bytes(self, tensor: int, pipeline: int) -> int:
        if self.measured is not None:
            share = self.measured.compute_share(tensor, self.num_kv_heads)
            return math.ceil(self.measured.token_bytes * share / pipeline)
        layers = self._cached_layers + self.mtp_layers
        indexers = self._count_indexers()
        own = -(-layers // pipeline) * self._compute_layer_kv_bytes(tensor)
        return own + -(-indexers // pipeline) * (self.latent.indexer_bytes if self.latent else 0)

    def _count_indexers(self) -> int:
        has_indexer = self.latent is not None and self.latent.index_heads > 0
        return self.latent.index_layers + self.mtp_layers if self.latent and has_indexer else 0

    @property
    def _cached_layers(self) -> int:
        """Layers whose KV counts per token."""
        windowed = self.windowed.layers if self.windowed else 0
        return self.attention_layers - windowed - self.layers_without_cache

    def _compute_windowed_bytes(self, tensor: int) -> int:
        return sum(own for _, own in self._list_windowed_bytes(tensor))

    def _list_windowed_bytes(self, tensor: int) -> list[tuple[int, int]]:
        """(last tokens that are kept, bytes of one of them) beside those of `sliding_window`."""
        if self.measured is not None:
            share = self.measured.compute_share(tensor, self.num_kv_heads)
            return [(tokens, math.ceil(own * share)) for tokens, own in self.measured.windows]
        if self.windowed is None:
            return []
        own = self.windowed.compute_layer_bytes(tensor, self.kv_dtype_bytes)
        return [(self.windowed.tokens, self.windowed.cached * own)]

    def compute_context_bytes_on_gpu(
        self, tokens: int, tensor: int = 1, pipeline: int = 1, *, beside: int = 0
    ) -> int:
        """Bytes that a request with a context of `tokens` keeps on such a GPU: KV, in layers with a
        window of the last tokens only and of `beside` others, and states, which do not grow."""
        window = self.sliding_window
        ended = max(0, tokens - window.tokens - beside) * window.layers if window else 0
        own = tokens * self._compute_kv_bytes(tensor, 1)
        own -= ended * self._compute_layer_kv_bytes(tensor)
        own += self.compute_bounded_bytes(tensor, tokens, beside=beside)
        return -(-own // pipeline)

    def compute_bounded_bytes(
        self, tensor: int = 1, tokens: int | None = None, *, beside: int = 0
    ) -> int:
        """Bytes that one request keeps on one of `tensor` GPUs in the layers of `windowed`, for the
        window and `beside` others, and as states, with a context of `tokens`; None: one that fills
        the windows."""
        kept = sum(
            own * (window if tokens is None else min(tokens, window + beside))
            for window, own in self._list_windowed_bytes(tensor)
        )
        return kept + self.compute_state_bytes(tensor)

    def compute_state_bytes(self, tensor: int = 1) -> int:
        """Bytes of one request's states on one of `tensor` GPUs, over all state layers."""
        if self.measured is not None:
            return -(-self.measured.state_bytes * self.measured.tensor // tensor)
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
        """FLOPs for one pair of a token and an earlier one, over all layers and heads but those of
        `windowed`. They are for scores and values; a prompt of n tokens has about n^2 / 2 pairs."""
        key, value = self.head_size, self.value_size
        if self.latent is not None:
            key, value = self.latent.key_size, self.latent.value_head_size
        return 2.0 * self._whole_layers * self.num_attention_heads * (key + value)

    @property
    def decode_attention_flops(self) -> float:
        """The same in decode, where MLA attends directly to the latents (absorbed weights)."""
        if self.latent is None:
            return self.prefill_attention_flops
        width = self.latent.cached_size + self.latent.kv_rank
        return 2.0 * self._whole_layers * self.num_attention_heads * width

    @property
    def _whole_layers(self) -> int:
        return self.attention_layers - (self.windowed.layers if self.windowed else 0)

    @property
    def shardable_kv_heads(self) -> int | None:
        """KV heads that limit which tensor sizes pair; None: none do. MLA's latent is replicated,
        and beside states vLLM's NixlConnector transfers copies of heads."""
        return self.num_kv_heads if self.latent is None and not self.has_states else None

    def list_windows(self) -> tuple[tuple[int, int], ...]:
        """(tokens of the sliding window, layers that have it); 0 tokens: the whole context."""
        if self.sliding_window is None:
            return ((0, self.attention_layers),)
        window = self.sliding_window
        own, whole = (window.tokens, window.layers), self.attention_layers - window.layers
        return (own, (0, whole)) if whole else (own,)

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
        heads = [(self.num_attention_heads, self.num_kv_heads if self.latent is None else 1)]
        if self.windowed is not None:
            heads.append((self.windowed.heads, self.windowed.kv_heads))
        for own, kv_heads in heads:
            if own % tensor:
                return f"{own} attention heads cannot be shared by {tensor} GPUs"
            if max(tensor, kv_heads) % min(tensor, kv_heads):
                return f"{kv_heads} KV heads cannot be shared by {tensor} GPUs"
        if self.states is not None and self.states.heads % tensor:
            return f"state layers of {self.states.heads} heads cannot be shared by {tensor} GPUs"
        has_dense = self.experts is None or self.experts.dense_layers
        if has_dense and self.intermediate_size % tensor:
            return f"an MLP of width {self.intermediate_size} cannot be shared by {tensor} GPUs"
        if pipeline > self.num_layers:
            return f"{self.num_layers} layers cannot fill {pipeline} pipeline stages"
        return None

    def _explain_shares(self, gpus: int, is_whole: bool) -> str | None:
        """Why so many GPUs cannot share the experts of a layer, as wholes or each of them."""
        assert self.experts is not None
        count, width = self.experts.count, self.experts.intermediate_size
        if is_whole:
            return f"{count} experts do not suffice for {gpus} GPUs" if count < gpus else None
        return f"an MLP of width {width} cannot be shared by {gpus} GPUs" if width % gpus else None

    def _count_routing_parameters(self) -> int:
        """Weights of a layer's router, and of the projections to and from experts' latents."""
        if self.experts is None:
            return 0
        return self.hidden_size * (self.experts.count + 2 * self.experts.latent_size)

    def _count_stored_mlp_parameters(self) -> tuple[int, int]:
        """MLP weights of (a dense layer, a mixture-of-experts layer)."""
        dense = self.count_mlp_parameters(self.intermediate_size)
        if self.experts is None:
            return dense, 0
        own = self.experts.count * self.count_expert_parameters()
        shared = self.count_mlp_parameters(self.experts.shared_intermediate_size)
        return dense, own + shared + self._count_routing_parameters()

    def _count_active_mlp_parameters(self) -> tuple[int, int]:
        dense, sparse = self._count_stored_mlp_parameters()
        if self.experts is None:
            return dense, 0
        idle = self.experts.count - self.experts.per_token
        return dense, sparse - idle * self.count_expert_parameters()

    def _sum_over_layers(self, mlp: tuple[int, int]) -> int:
        """Attention and MLP weights of all layers; `mlp`: (of a dense, of an expert layer)."""
        mlps = self.dense_mlp_layers * mlp[0] + self.expert_layers * mlp[1]
        return self.num_layers * self.count_attention_parameters() + mlps

    def _compute_layer_kv_bytes(self, tensor: int) -> int:
        """Bytes of one token's KV in one layer on one of `tensor` GPUs, without an indexer's."""
        if self.latent is not None:
            return self.latent.compute_cached_bytes(self.kv_dtype_bytes)
        kv_heads = -(-self.num_kv_heads // tensor)
        return kv_heads * (self.head_size + self.value_size) * self.kv_dtype_bytes
