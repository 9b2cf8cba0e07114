"""Builds a model's shape from its config.json: each field is understood, or refused by name.

Called for folders, names in the table of known models, and configs of resources and reports. What
is hard: the same words mean other layers in other families, so the `model_type` decides which
fields are read (`families`), and any other field of sizes is refused (`unread_fields`).
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from cleave.perf.model import config_parts, engine_report, known_models, unread_fields
from cleave.perf.model.attention import (
    LatentAttention,
    SlidingWindow,
    WindowedAttention,
    read_latent_attention,
)
from cleave.perf.model.experts import mark_fields, read_experts
from cleave.perf.model.families import ModelFamily
from cleave.perf.model.family_table import FAMILIES
from cleave.perf.model.hf_config import REMEDY, ConfigFields, ModelConfigError
from cleave.perf.model.layer_kinds import Kinds, LayerKind, count_layers
from cleave.perf.model.quantization import compute_quantization, has_8_bit_kv, read_scheme
from cleave.perf.model.shape import MTP_FIELDS
from cleave.perf.model.shape import ModelShape as ModelShape
from cleave.perf.model.shape import UnknownModelError as UnknownModelError
from cleave.perf.model.weight_modules import list_modules

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float": 4, "half": 2}
_AUTO_BYTES = 2
"""vLLM's `--dtype auto` casts checkpoints of 32 bits to 16 (`_resolve_auto_dtype`)."""
DTYPES = ("auto", *_DTYPE_BYTES)
"""Of vLLM's `--dtype`."""
_ASSUMED_LENGTH = 2048
"""Of a context, where a file says none; vLLM assumes the same."""
_GATED_ACTIVATIONS = ("silu", "swish", "gelu", "swiglu", "geglu", "reglu", "sigmoid")
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "mlp_hidden_act")


def load_shape(model: str, dtype: str = "auto") -> ModelShape:
    """The shape of a folder with a config.json, of such a file, or of a known model by name, loaded
    with vLLM's `--dtype`. Raises UnknownModelError, which names the missing or wrong field."""
    path = Path(model)
    if path.is_dir() or path.is_file():
        file = path / "config.json" if path.is_dir() else path
        try:
            return build_shape(file.absolute().parent.name, config_parts.read_file(file), dtype)
        except ModelConfigError as error:
            raise UnknownModelError(f"{file}: {error}") from error
    found = known_models.find_config(model)
    if found is None:
        raise UnknownModelError(
            f"{model!r} is neither a folder with a config.json nor a known model; give a folder "
            "that holds only its config.json to plan it (hf download MODEL config.json --local-dir "
            f"FOLDER); known: {', '.join(known_models.CONFIGS)}"
        )
    return from_config(*found, dtype)


def from_config(name: str, config: Mapping[str, object], dtype: str = "auto") -> ModelShape:
    """The shape of a decoded config.json, loaded with vLLM's `--dtype`. Raises
    UnknownModelError."""
    try:
        report = engine_report.find(config)
        if report is not None:
            return engine_report.build_shape(name, report)
        return build_shape(name, config_parts.select_language_part(config), dtype)
    except ModelConfigError as error:
        raise UnknownModelError(f"{name}: {error}") from error


def build_shape(name: str, config: ConfigFields, dtype: str = "auto") -> ModelShape:
    """The shape of the language model's part of a config. Raises ModelConfigError."""
    family = _find_family(config)
    hidden = config.get_number("hidden_size", *_list_own(family, "hidden_size"))
    heads = config.get_number("num_attention_heads")
    kinds = family.kinds(config, count_layers(config))
    states = sum(each in (LayerKind.RECURRENT, LayerKind.BOTH) for each in kinds)
    dtype_bytes = _read_dtype_bytes(config, dtype)
    longest = _read_longest(config, family)
    alone = sum(each in (LayerKind.MLP, LayerKind.EXPERTS) for each in kinds)
    latent = read_latent_attention(config, len(kinds)) if family.has_latents else None
    shape = ModelShape(
        name=name,
        num_layers=len(kinds),
        hidden_size=hidden,
        num_attention_heads=heads,
        num_kv_heads=_read_kv_heads(config, family, heads, latent),
        head_size=_read_head_size(config, family, hidden, heads, latent),
        vocab_size=config.get_number("vocab_size", *_list_own(family, "vocab_size")),
        max_model_len=longest,
        intermediate_size=_read_intermediate_size(config, family, kinds, hidden),
        dtype_bytes=dtype_bytes,
        value_head_size=_read_value_size(config, family),
        kv_dtype_bytes=1 if has_8_bit_kv(config) else dtype_bytes,
        has_gated_mlp=family.is_gated,
        has_tied_embeddings=_has_tied_embeddings(config, family),
        learned_positions=_count_positions(family, longest),
        latent=latent,
        sliding_window=None if family.window_heads else _read_window(config, family, kinds),
        states=family.states(config, states, dtype_bytes) if states and family.states else None,
        layers_without_attention=alone,
        layers_with_both=sum(each is LayerKind.BOTH for each in kinds),
        layers_without_mlp=len(kinds) - alone if alone else 0,
        stored_mtp_layers=config.get_optional_number(*MTP_FIELDS, least=0) or 0,
        has_output_gate=_has_output_gate(config, family),
        norms_all_heads=family.norms_all_heads,
        # It is a part of the file then.
        has_encoders=bool(config.path),
    )
    shape = _with_layer_tables(_with_window_heads(shape, config, family, kinds), config, family)
    shape = _with_experts(shape, config, family, kinds)
    scheme = read_scheme(config)
    _check_others(config, family)
    unread_fields.check_all_read(config)
    if scheme is None:
        return shape
    modules = list_modules(shape, family, kinds)
    return replace(shape, quantization=compute_quantization(scheme, modules, len(kinds)))


def _find_family(config: ConfigFields) -> ModelFamily:
    family = FAMILIES.get(config.get_text("model_type") or "")
    if family is None:
        raise config.build_error("model_type", f"{config_parts.UNKNOWN_TYPE}; {REMEDY}")
    return family


def _list_own(family: ModelFamily, name: str) -> list[str]:
    return [family.names[name]] if name in family.names else []


def _check_others(config: ConfigFields, family: ModelFamily) -> None:
    """Fields that may have some values only."""
    for name in family.ignored:
        config.get(name)
    for name, other in family.same.items():
        if config.has(name) and config.get(name) != config.get(other):
            raise config.build_error(name, f"it is {other} in plans; {REMEDY}")
    for name, allowed in family.only.items():
        if config.get(name) not in allowed:
            raise config.build_error(name, REMEDY)
    if not family.is_gated:
        for name in _ACTIVATIONS:
            config.get(name)
        return
    for name in _ACTIVATIONS:
        act = config.get_text(name)
        if act is not None and not act.lower().startswith(_GATED_ACTIVATIONS):
            raise config.build_error(name, f"plans know MLPs with a gate; {REMEDY}")


def _read_dtype_bytes(config: ConfigFields, dtype: str) -> int:
    for name in ("torch_dtype", "dtype"):
        own = (config.get_text(name) or "bfloat16").removeprefix("torch.")
        if own not in _DTYPE_BYTES:
            raise config.build_error(name, f"write one of {', '.join(_DTYPE_BYTES)}")
    return _AUTO_BYTES if dtype == "auto" else _DTYPE_BYTES[dtype]


def _read_longest(config: ConfigFields, family: ModelFamily) -> int:
    names = (
        *("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
        *("model_max_length", "max_sequence_length"),
    )
    own = _list_own(family, "max_position_embeddings")
    longest = config.get_optional_number(*own, *names) or _ASSUMED_LENGTH
    scaling = config.get_object("rope_parameters") or config.get_object("rope_scaling")
    if scaling is None or "rope_scaling" in family.ignored:
        return longest
    kind = scaling.get_text("rope_type", "type")
    if kind == "longrope":
        # vLLM's default: beyond it, short prompts lose quality.
        return config.get_optional_number("original_max_position_embeddings") or longest
    factor = scaling.get("factor")
    if kind not in ("linear", "dynamic", "ntk") or not isinstance(factor, int | float):
        return longest
    return max(1, round(longest * factor))


def _count_positions(family: ModelFamily, longest: int) -> int:
    return 0 if family.learned_positions is None else longest + family.learned_positions


def _read_kv_heads(
    config: ConfigFields, family: ModelFamily, heads: int, latent: LatentAttention | None
) -> int:
    if latent is not None:
        config.get(*family.kv_heads)
        return heads
    if config.get_text("model_type") == "chatglm" and not config.get_flag("multi_query_attention"):
        config.get("multi_query_group_num")
        return heads
    # Falcon's second generation has this flag, too, although it uses grouped queries.
    is_grouped = not family.has_single_head or config.get_flag("new_decoder_architecture")
    if not is_grouped and config.get_flag("multi_query"):
        return 1
    kv_heads = config.get_optional_number(*family.kv_heads) if family.kv_heads else None
    if kv_heads is not None and heads % kv_heads:
        remedy = f"the {heads} attention heads must be a multiple of it"
        raise config.build_error(family.kv_heads[0], remedy)
    return kv_heads or heads


def _read_head_size(
    config: ConfigFields,
    family: ModelFamily,
    hidden: int,
    heads: int,
    latent: LatentAttention | None,
) -> int:
    if latent is not None:
        if config.get_optional_number("qk_head_dim") not in (None, latent.key_size):
            raise config.build_error("qk_head_dim", f"its parts have {latent.key_size} together")
        config.get("head_dim")
        return latent.key_size
    own = config.get_optional_number("head_dim", "kv_channels", *_list_own(family, "head_dim"))
    if own is None and hidden % heads:
        raise config.build_error("head_dim", f"set it: {heads} heads do not divide {hidden} evenly")
    if family.computes_heads and own is not None and own != hidden // heads:
        remedy = f"its class has heads of {hidden // heads}; {REMEDY}"
        raise config.build_error("head_dim", remedy)
    return own or hidden // heads


def _has_tied_embeddings(config: ConfigFields, family: ModelFamily) -> bool:
    is_tied = config.get_flag("tie_word_embeddings")
    return is_tied if family.tied is None else family.tied


def _has_output_gate(config: ConfigFields, family: ModelFamily) -> bool:
    if family.output_gate is None or not family.gate_field:
        return family.output_gate is True
    return config.get_flag(family.gate_field, default=family.output_gate)


def _read_value_size(config: ConfigFields, family: ModelFamily) -> int:
    return (config.get_optional_number(family.value_size) or 0) if family.value_size else 0


def _read_intermediate_size(
    config: ConfigFields, family: ModelFamily, kinds: Kinds, hidden: int
) -> int:
    if LayerKind.EXPERTS in kinds and LayerKind.MLP not in kinds:
        # Nemotron 3 states a width that no layer has.
        config.get("intermediate_size")
        return config.get_number("moe_intermediate_size")
    return family.width(config, hidden)


def _read_window(config: ConfigFields, family: ModelFamily, kinds: Kinds) -> SlidingWindow | None:
    chunked = sum(each is LayerKind.CHUNKED for each in kinds)
    sliding = sum(each is LayerKind.SLIDING for each in kinds)
    if not chunked + sliding:
        return None
    tokens = config.get_number("attention_chunk_size" if chunked else "sliding_window")
    return SlidingWindow(tokens + family.window_more, chunked + sliding)


def _with_window_heads(
    shape: ModelShape, config: ConfigFields, family: ModelFamily, kinds: Kinds
) -> ModelShape:
    """The shape with layers that have a window and heads of their own."""
    fields = family.window_heads
    if fields is None:
        return shape
    key_size = config.get_number(fields.key_size)
    value_size = config.get_optional_number(fields.value_size) if fields.value_size else None
    sliding = sum(each is LayerKind.SLIDING for each in kinds)
    shared = config.get_optional_number("num_kv_shared_layers", least=0) or 0
    uncached = sum(each is LayerKind.SLIDING for each in kinds[len(kinds) - shared :])
    windowed = WindowedAttention(
        tokens=config.get_number("sliding_window_size", "sliding_window"),
        layers=sliding,
        heads=config.get_number(fields.heads),
        kv_heads=config.get_number(fields.kv_heads),
        key_size=key_size,
        value_size=value_size or key_size,
        uncached=uncached if shared else 0,
    )
    whole = shape
    if fields.whole_head_size:
        size = config.get_optional_number(fields.whole_head_size) or 512
        own = config.get_optional_number(fields.whole_kv_heads)
        is_own = config.get_flag("attention_k_eq_v") and own is not None
        kv_heads = own if is_own and own else shape.num_kv_heads
        whole = replace(shape, head_size=size, num_kv_heads=kv_heads)
    without = shared - uncached if shared else 0
    return replace(whole, windowed=windowed if sliding else None, layers_without_cache=without)


def _with_layer_tables(shape: ModelShape, config: ConfigFields, family: ModelFamily) -> ModelShape:
    """The shape with the tables in which each layer looks tokens up (Gemma 4)."""
    if not family.has_layer_tables:
        return shape
    name = "hidden_size_per_layer_input"
    if name not in config.values:
        # Its class has 256 by default, and the larger models, which have none, all say so.
        kind = config.get_text("model_type")
        fault = f"{config.path}{name} is missing, which decides the size of {kind}"
        raise ModelConfigError(f"{fault}; add it to the config as it was published")
    width = config.get_optional_number(name, least=0) or 0
    rows = config.get_optional_number("vocab_size_per_layer_input") or shape.vocab_size
    return replace(
        shape,
        layer_table_parameters=rows * width * shape.num_layers,
        layer_parameters=3 * shape.hidden_size * width,
    )


def _with_experts(
    shape: ModelShape, config: ConfigFields, family: ModelFamily, kinds: Kinds
) -> ModelShape:
    if family.experts is None:
        return shape
    alone = any(each in (LayerKind.MLP, LayerKind.EXPERTS) for each in kinds)
    if alone and LayerKind.EXPERTS not in kinds:
        mark_fields(config, family.experts)
        return shape
    experts = read_experts(config, family.experts, shape.num_layers)
    if experts is not None and alone:
        experts = replace(experts, dense_layers=sum(each is LayerKind.MLP for each in kinds))
    return replace(shape, experts=experts)
