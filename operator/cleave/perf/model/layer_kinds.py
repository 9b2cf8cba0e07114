"""Which layers of a model attend to everything, to a window, or keep a state of constant size.

Read from a config.json for cleave.perf.model.model_shape. What is hard: families say it in six
ways (lists of names, letters or numbers, intervals, a window for all), and some of them in none; a
kind that is taken for full attention is off by a factor of four in memory. So each family has the
way that its class reads (`cleave.perf.model.families`), and kinds that are not known are refused.
"""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from cleave.perf.model.hf_config import ConfigFields, ModelConfigError


class LayerKind(Enum):
    """What a layer does besides its MLP."""

    FULL = "full attention"
    SLIDING = "sliding window"
    CHUNKED = "chunked attention"
    RECURRENT = "state"
    BOTH = "full attention and a state"
    MLP = "nothing"
    """A layer of its own for the MLP, as Nemotron-H counts them."""
    EXPERTS = "experts"
    """A layer of its own for experts."""


Kinds = tuple[LayerKind, ...]
ReadKinds = Callable[[ConfigFields, int], Kinds]
"""The kinds of a number of layers. Raises ModelConfigError, also for kinds that are not known."""

_KIND_BY_NAME: Mapping[str, LayerKind] = {
    **dict.fromkeys(
        ("full_attention", "attention", "indexed_attention", "deepseek_sparse_attention"),
        LayerKind.FULL,
    ),
    "sliding_attention": LayerKind.SLIDING,
    "chunked_attention": LayerKind.CHUNKED,
    **dict.fromkeys(("linear_attention", "mamba", "mamba2", "conv"), LayerKind.RECURRENT),
    "moe": LayerKind.EXPERTS,
    "mlp": LayerKind.MLP,
}
_KIND_BY_LETTER = {
    "*": LayerKind.FULL,
    "M": LayerKind.RECURRENT,
    "E": LayerKind.EXPERTS,
    "-": LayerKind.MLP,
}
"""In Nemotron-H's `hybrid_override_pattern`."""
_ATTENTION = frozenset({LayerKind.FULL, LayerKind.SLIDING})
_STATES = frozenset({LayerKind.FULL, LayerKind.RECURRENT})
_MAX_LAYERS = 1_000
"""Each layer is looked at; the deepest models have some hundreds."""
_NO_ROPE_INTERVAL = 4
"""Llama 4: every fourth layer attends to everything unless `no_rope_layers` says otherwise."""


def count_layers(config: ConfigFields) -> int:
    """Number of layers. Raises ModelConfigError."""
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    listed = config.get("layers_block_type") or config.get("hybrid_override_pattern")
    number = config.get_optional_number(*names)
    if number is None and isinstance(listed, Sequence) and listed:
        number = len(listed)
    if number is not None and number > _MAX_LAYERS:
        field = next((name for name in names if config.has(name)), "layers_block_type")
        raise config.build_error(field, f"write a number up to {_MAX_LAYERS}")
    return config.get_number(*names) if number is None else number


def read_full(config: ConfigFields, layers: int) -> Kinds:
    """Full attention everywhere; a `sliding_window` is that of all layers, unless a list of
    `layer_types` has others (vLLM 0.32, `EngineArgs.create_engine_config`)."""
    kinds = _read_listed(config, layers, _ATTENTION)
    window = config.get_optional_number("sliding_window", least=0)
    is_windowed = kinds is None or all(kind is LayerKind.SLIDING for kind in kinds)
    return (LayerKind.SLIDING if window and is_windowed else LayerKind.FULL,) * layers


def read_whole(config: ConfigFields, layers: int) -> Kinds:
    """Full attention everywhere, in classes that have no window."""
    _read_listed(config, layers, frozenset({LayerKind.FULL}))
    return (LayerKind.FULL,) * layers


def read_flagged(config: ConfigFields, layers: int) -> Kinds:
    """The same with `use_sliding_window`; the layers before `max_window_layers` are full (Qwen)."""
    if not config.get_flag("use_sliding_window"):
        for name in ("sliding_window", "max_window_layers", "layer_types"):
            config.get(name)
        return (LayerKind.FULL,) * layers
    first = config.get_optional_number("max_window_layers", least=0) or 0
    if first and not config.has("layer_types"):
        config.get("sliding_window")
        return (LayerKind.FULL,) * layers
    return read_full(config, layers)


def read_listed(pattern: Callable[[ConfigFields, int], bool]) -> ReadKinds:
    """`layer_types`; without that list, a layer has a window if `pattern` says so of its index."""

    def read(config: ConfigFields, layers: int) -> Kinds:
        kinds = _read_listed(config, layers, _ATTENTION)
        derived = tuple(
            LayerKind.SLIDING if pattern(config, i) else LayerKind.FULL for i in range(layers)
        )
        has_window = config.get_optional_number("sliding_window", least=0)
        return (kinds or derived) if has_window else (LayerKind.FULL,) * layers

    return read


def match_all_but(
    number: int, *fields: str, is_first_full: bool = False
) -> Callable[[ConfigFields, int], bool]:
    """Whether a layer is no `number`-th one; `fields` may say another number."""

    def is_windowed(config: ConfigFields, index: int) -> bool:
        own = config.get_optional_number(*fields) if fields else None
        return (index if is_first_full else index + 1) % (own or number) != 0

    return is_windowed


def read_but_last(pattern: Callable[[ConfigFields, int], bool]) -> ReadKinds:
    """`read_listed`, but for the last layer, which is always full (Gemma 4)."""
    read = read_listed(pattern)
    return lambda config, layers: (*read(config, layers)[:-1], LayerKind.FULL)


def read_ones(*fields: str) -> ReadKinds:
    """A list with 1 for each layer with a window (MiMo)."""

    def read(config: ConfigFields, layers: int) -> Kinds:
        listed = config.get_list(*fields)
        if listed is None or len(listed) < layers or any(each not in (0, 1) for each in listed):
            raise config.build_error(fields[0], f"write 0 or 1 for each of {layers} layers")
        return tuple(LayerKind.SLIDING if each else LayerKind.FULL for each in listed[:layers])

    return read


def match_none(_: ConfigFields, __: int) -> bool:
    """No layer has a window unless a list says so."""
    return False


def read_chunked(config: ConfigFields, layers: int) -> Kinds:
    """Llama 4: layers with rotated positions attend to chunks."""
    own = _read_listed(config, layers, frozenset({LayerKind.FULL, LayerKind.CHUNKED}))
    ropes = config.get_list("no_rope_layers")
    step = config.get_optional_number("no_rope_layer_interval") or _NO_ROPE_INTERVAL
    if not ropes or len(ropes) < layers:
        ropes = [int(i % step != 0) for i in range(1, layers + 1)]
    kinds = tuple(LayerKind.CHUNKED if rope else LayerKind.FULL for rope in ropes[:layers])
    if own is not None and own != kinds:
        raise config.build_error("layer_types", "write what no_rope_layers says, or leave it out")
    has_chunks = config.get_optional_number("attention_chunk_size", least=0)
    return kinds if has_chunks else (LayerKind.FULL,) * layers


def read_interval(config: ConfigFields, layers: int) -> Kinds:
    """Qwen's hybrids: each `full_attention_interval`-th layer has attention, the others a state."""
    step = config.get_optional_number("full_attention_interval") or 4
    derived = tuple(
        LayerKind.FULL if i % step == 0 else LayerKind.RECURRENT for i in range(1, layers + 1)
    )
    return _read_listed(config, layers, _STATES) or derived


def read_states(config: ConfigFields, layers: int) -> Kinds:
    """`layer_types` (or `layers_block_type`), without which all layers have states (Granite 4)."""
    return _read_listed(config, layers, _STATES) or (LayerKind.RECURRENT,) * layers


def read_single(config: ConfigFields, layers: int) -> Kinds:
    """Nemotron-H: each layer is one thing, by name or by letter."""
    known = _STATES | {LayerKind.MLP, LayerKind.EXPERTS}
    kinds = _read_listed(config, layers, known, "layers_block_type", "layer_types")
    if kinds is None:
        kinds = _read_listed(config, layers, known, "hybrid_override_pattern")
    if kinds is None:
        fault = f"{config.path}layers_block_type (or hybrid_override_pattern) is missing"
        raise ModelConfigError(f"{fault}; add it to the config")
    return kinds


def read_both(_: ConfigFields, layers: int) -> Kinds:
    """Falcon-H1: attention and a state side by side."""
    return (LayerKind.BOTH,) * layers


def read_attention_period(config: ConfigFields, layers: int) -> Kinds:
    """Jamba: attention in one layer of a period, a state in the others."""
    period = config.get_number("attn_layer_period")
    offset = config.get_optional_number("attn_layer_offset", least=0) or 0
    return tuple(
        LayerKind.FULL if i % period == offset else LayerKind.RECURRENT for i in range(layers)
    )


def read_numbers(config: ConfigFields, layers: int) -> Kinds:
    """Kimi Linear: the layers with attention by their numbers from 1."""
    linear = config.get_object("linear_attn_config")
    if linear is None:
        raise ModelConfigError(f"{config.path}linear_attn_config is missing; add it to the config")
    listed = linear.get_list("full_attn_layers")
    if listed is None or not all(type(each) is int for each in listed):
        raise linear.build_error("full_attn_layers", "write the numbers of these layers")
    others = linear.get_list("kda_layers")
    full = frozenset(listed)
    rest = [i for i in range(1, layers + 1) if i not in full]
    if others is not None and [*others] != rest:
        raise linear.build_error("kda_layers", "write the other layers")
    return tuple(LayerKind.FULL if i in full else LayerKind.RECURRENT for i in range(1, layers + 1))


def _read_listed(
    config: ConfigFields, layers: int, known: frozenset[LayerKind], *fields: str
) -> Kinds | None:
    """The kinds in a list of names, or in a text of letters; None: the config has none."""
    fields = fields or ("layer_types",)
    value = config.get(*fields)
    if value is None:
        return None
    name = next((each for each in fields if config.values.get(each) is not None), fields[0])
    if not isinstance(value, Sequence) or (isinstance(value, str) and "hybrid" not in name):
        raise config.build_error(name, "write a list with a name for each layer")
    if len(value) < layers:
        fault = f"{config.path}{name} has {len(value)} of {layers} layers"
        raise ModelConfigError(f"{fault}; write one for each")
    names = {**_KIND_BY_NAME, **(_KIND_BY_LETTER if isinstance(value, str) else {})}
    kinds = []
    for each in value[:layers]:
        kind = names.get(each) if isinstance(each, str) else None
        if kind not in known:
            fits = ", ".join(key for key, own in names.items() if own in known)
            fault = f"{config.path}{name} has {str(each)[:40]!r}, which cannot be planned"
            raise ModelConfigError(f"{fault}; known are {fits}")
        kinds.append(kind)
    return tuple(kinds)
