"""Which layers of a model attend to everything, to a window, or keep a state of constant size.

Read from a config.json for cleave.perf.model.model_shape. What is hard: families say it in five
ways (`layer_types`, `layers_block_type`, `hybrid_override_pattern`, intervals, lists of numbers),
and a kind that is taken for full attention is off by a factor of four in memory; so kinds that are
not known are refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from cleave.perf.model.hf_config import ConfigFields, ModelConfigError


class LayerKind(Enum):
    """What a layer does besides its MLP."""

    FULL = "full attention"
    SLIDING = "sliding window"
    CHUNKED = "chunked attention"
    RECURRENT = "state"
    MLP = "nothing"
    """A layer of its own for the MLP or experts, as Nemotron-H counts them."""


_KIND_BY_NAME: Mapping[str, LayerKind] = {
    **dict.fromkeys(
        ("full_attention", "attention", "indexed_attention", "deepseek_sparse_attention"),
        LayerKind.FULL,
    ),
    "sliding_attention": LayerKind.SLIDING,
    "chunked_attention": LayerKind.CHUNKED,
    **dict.fromkeys(("linear_attention", "mamba", "mamba2"), LayerKind.RECURRENT),
    **dict.fromkeys(("moe", "mlp"), LayerKind.MLP),
}
_KIND_BY_LETTER = {
    "*": LayerKind.FULL,
    "M": LayerKind.RECURRENT,
    "E": LayerKind.MLP,
    "-": LayerKind.MLP,
}
"""In Nemotron-H's `hybrid_override_pattern`."""
_DENSE_NAMES = ("mlp", "-")
_STATE_FIELDS = ("mamba_d_state", "ssm_state_size", "linear_num_value_heads", "linear_attn_config")
"""Fields that only models with state layers have."""
_MAX_LAYERS = 10_000
"""Each layer is looked at; the deepest models have some hundreds."""
_NO_ROPE_INTERVAL = 4
"""Llama 4: every fourth layer attends to everything unless `no_rope_layers` says otherwise."""


@dataclass(frozen=True, slots=True)
class LayerKinds:
    """The kind of each layer, first layer first."""

    kinds: tuple[LayerKind, ...]
    dense_mlps: int = 0
    """Of the layers of their own, those that have a dense MLP."""

    def count(self, *kinds: LayerKind) -> int:
        """Number of layers of these kinds."""
        return sum(kind in kinds for kind in self.kinds)


def count_layers(config: ConfigFields) -> int:
    """Number of layers. Raises ModelConfigError."""
    fields = ("num_hidden_layers", "n_layer", "n_layers")
    number = config.get_optional_number(*fields)
    if number is not None and number > _MAX_LAYERS:
        field = next(name for name in fields if config.values.get(name) is not None)
        raise config.build_error(field, f"write a number up to {_MAX_LAYERS}")
    names = config.values.get("layers_block_type")
    if number is None and isinstance(names, Sequence) and not isinstance(names, str) and names:
        if len(names) > _MAX_LAYERS:
            raise config.build_error("layers_block_type", f"list up to {_MAX_LAYERS} layers")
        return len(names)
    return number if number is not None else config.get_number(*fields)


def read_layer_kinds(config: ConfigFields) -> LayerKinds:
    """The kinds of all layers. Raises ModelConfigError, also for kinds that are not known."""
    layers = count_layers(config)
    names = _read_names(config, layers)
    if names is not None:
        dense = sum(name in _DENSE_NAMES for name in names)
        return LayerKinds(tuple(map(_KINDS.__getitem__, names)), dense)
    kinds = _read_intervals(config, layers)
    has_states = any(config.values.get(name) is not None for name in _STATE_FIELDS)
    if has_states and LayerKind.RECURRENT not in kinds:
        field = next(name for name in _STATE_FIELDS if config.values.get(name) is not None)
        where = f"{config.path}{field} says that there are state layers, and nothing which"
        raise ModelConfigError(f"{where}; add layer_types with a name for each layer")
    return LayerKinds(kinds)


_KINDS = {**_KIND_BY_NAME, **_KIND_BY_LETTER}


def _read_names(config: ConfigFields, layers: int) -> list[str] | None:
    """A name or a letter for each layer; None: the config has no such list."""
    for field in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
        value = config.values.get(field)
        if value is None:
            continue
        if field == "layer_types" and isinstance(value, str):
            raise config.build_error(field, "write a list with a name for each layer")
        if not isinstance(value, Sequence):
            raise config.build_error(field, "write a name for each layer")
        names = [str(name) for name in value[:layers]]
        if len(names) < layers:
            raise ModelConfigError(
                f"{config.path}{field} has {len(names)} of {layers} layers; write one for each"
            )
        for name in names:
            if name not in _KINDS:
                known = ", ".join(_KIND_BY_NAME)
                raise ModelConfigError(
                    f"{config.path}{field} has {name[:40]!r}, which cannot be planned; known are "
                    f"{known}"
                )
        return names
    return None


def _read_intervals(config: ConfigFields, layers: int) -> tuple[LayerKind, ...]:
    """The kinds of a model that names an interval, or the layers of one kind."""
    if (interval := config.get_optional_number("full_attention_interval")) is not None:
        return _build_interval(layers, interval, LayerKind.RECURRENT)
    if (linear := config.get_object("linear_attn_config")) is not None:
        # Kimi Linear counts from 1.
        listed = linear.values.get("full_attn_layers")
        if not isinstance(listed, Sequence) or not all(type(each) is int for each in listed):
            raise linear.build_error("full_attn_layers", "write the numbers of these layers")
        full_numbers = frozenset(listed)
        return tuple(
            LayerKind.FULL if number in full_numbers else LayerKind.RECURRENT
            for number in range(1, layers + 1)
        )
    if config.get_optional_number("attention_chunk_size") is not None:
        ropes = config.values.get("no_rope_layers")
        if not isinstance(ropes, Sequence) or len(ropes) < layers:
            return _build_interval(layers, _NO_ROPE_INTERVAL, LayerKind.CHUNKED)
        return tuple(
            LayerKind.CHUNKED if has_rope else LayerKind.FULL for has_rope in ropes[:layers]
        )
    has_window = config.get_optional_number("sliding_window") is not None
    interval = config.get_optional_number("sliding_window_pattern") if has_window else None
    if interval is not None:
        return _build_interval(layers, interval, LayerKind.SLIDING)
    return (LayerKind.FULL,) * layers


def _build_interval(layers: int, interval: int, other: LayerKind) -> tuple[LayerKind, ...]:
    """Full attention in every `interval`-th layer."""
    return tuple(LayerKind.FULL if i % interval == 0 else other for i in range(1, layers + 1))
