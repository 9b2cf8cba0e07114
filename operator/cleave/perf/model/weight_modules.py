"""The linear layers of a model by the names that checkpoints have for them, with their weights.

Called by cleave.perf.model.model_shape, to find which of them a list of names means.
"""

from collections.abc import Iterator

from cleave.perf.model.families import ModelFamily
from cleave.perf.model.layer_kinds import Kinds, LayerKind
from cleave.perf.model.name_patterns import WeightModule
from cleave.perf.model.quantization import WeightPart
from cleave.perf.model.shape import ModelShape

_UP = ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "up", "c_fc")
_QUERIES_KEYS_VALUES = ("q_proj", "k_proj", "v_proj")
_DOWN = ("down_proj", "w2", "down", "c_proj")


def list_modules(
    shape: ModelShape, family: ModelFamily, kinds: Kinds
) -> Iterator[tuple[WeightPart, WeightModule]]:
    """All linear layers that may be quantised, layer by layer, and the LM head."""
    dense = shape.experts.dense_layers if shape.experts else len(kinds)
    for i, kind in enumerate(kinds):
        if kind in (LayerKind.RECURRENT, LayerKind.BOTH):
            yield from _list_states(shape, family, i)
        if kind not in (LayerKind.RECURRENT, LayerKind.MLP, LayerKind.EXPERTS):
            yield from _list_attention(shape, family, i)
        is_alone = kind in (LayerKind.MLP, LayerKind.EXPERTS)
        if shape.layers_without_mlp and not is_alone:
            continue
        # Which layers are dense matters little to a mean: they are taken to be the first.
        is_dense = kind is LayerKind.MLP if is_alone else i < dense
        yield from _list_mlp(shape, family, i) if is_dense else _list_experts(shape, family, i)
    if not shape.has_tied_embeddings:
        yield WeightPart.LM_HEAD, WeightModule(-1, ("lm_head", "head"), shape.lm_head_parameters)


def _list_attention(
    shape: ModelShape, family: ModelFamily, layer: int
) -> Iterator[tuple[WeightPart, WeightModule]]:
    hidden, heads, where = shape.hidden_size, shape.num_attention_heads, family.parts.attention
    if (latent := shape.latent) is not None:
        own = {
            "kv_a_proj_with_mqa": hidden * latent.cached_size,
            "kv_b_proj": heads * latent.kv_rank * (latent.nope_head_size + latent.value_head_size),
            "o_proj": heads * latent.value_head_size * hidden,
        }
        if latent.q_rank:
            own["q_a_proj"] = hidden * latent.q_rank
            own["q_b_proj"] = heads * latent.key_size * latent.q_rank
        else:
            own["q_proj"] = heads * latent.key_size * hidden
        if latent.index_heads:
            width = latent.index_heads * latent.index_head_size
            own["indexer.wq_b"] = (latent.q_rank or hidden) * width
            own["indexer.wk"] = hidden * latent.index_head_size
    else:
        queries = hidden * heads * shape.head_size
        keys = hidden * shape.num_kv_heads * shape.head_size
        values = hidden * shape.num_kv_heads * (shape.value_head_size or shape.head_size)
        own = {
            "q_proj": queries * (2 if shape.has_output_gate else 1),
            "k_proj": keys,
            "v_proj": values,
            "o_proj": hidden * heads * (shape.value_head_size or shape.head_size),
        }
    joined = ("qkv_proj", "query_key_value", "Wqkv", "c_attn", "qkv")
    for name, parameters in own.items():
        is_input = name in _QUERIES_KEYS_VALUES and shape.latent is None
        others = joined if is_input else ("out_proj", "dense", "wo") if name == "o_proj" else ()
        names = tuple(f"{where}.{each}" for each in (name, *others))
        parts = tuple(f"{where}.{each}" for each in _QUERIES_KEYS_VALUES) if is_input else ()
        yield WeightPart.ATTENTION, WeightModule(layer, names, parameters, joined=parts)


def _list_states(
    shape: ModelShape, family: ModelFamily, layer: int
) -> Iterator[tuple[WeightPart, WeightModule]]:
    assert shape.states is not None
    where, small = family.parts.states, shape.states.small_parameters
    own = shape.states.parameters - small
    out = min(own, shape.hidden_size * shape.states.inner_size)
    inputs = ("in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj", "q_proj", "k_proj", "v_proj")
    yield (
        WeightPart.STATES,
        WeightModule(layer, tuple(f"{where}.{each}" for each in inputs), own - out),
    )
    outputs = ("out_proj", "o_proj")
    yield WeightPart.STATES, WeightModule(layer, tuple(f"{where}.{each}" for each in outputs), out)
    yield WeightPart.STATES, WeightModule(layer, (f"{where}.conv1d",), small, is_plain=True)


def _list_mlp(
    shape: ModelShape, family: ModelFamily, layer: int
) -> Iterator[tuple[WeightPart, WeightModule]]:
    one = shape.hidden_size * shape.intermediate_size
    yield from _list_matrices(shape, WeightPart.MLP, family.parts.mlp, layer, one)


def _list_experts(
    shape: ModelShape, family: ModelFamily, layer: int
) -> Iterator[tuple[WeightPart, WeightModule]]:
    assert shape.experts is not None
    where = family.parts.experts
    names = (where, *(f"{where}.0.{each}" for each in (*_UP, *_DOWN)))
    parameters = shape.experts.count * shape.count_expert_parameters()
    yield WeightPart.EXPERTS, WeightModule(layer, names, parameters)
    if shape.experts.shared_intermediate_size:
        one = shape.hidden_size * shape.experts.shared_intermediate_size
        yield from _list_matrices(shape, WeightPart.SHARED, family.parts.shared, layer, one)


def _list_matrices(
    shape: ModelShape, part: WeightPart, where: str, layer: int, one: int
) -> Iterator[tuple[WeightPart, WeightModule]]:
    """The matrices of an MLP, each with `one` weights."""
    up = (2 if shape.has_gated_mlp else 1) * one
    joined = tuple(f"{where}.{each}" for each in _UP[:2]) if shape.has_gated_mlp else ()
    yield part, WeightModule(layer, tuple(f"{where}.{each}" for each in _UP), up, joined=joined)
    yield part, WeightModule(layer, tuple(f"{where}.{each}" for each in _DOWN), one)
