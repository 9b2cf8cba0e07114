"""The language model's part of a config.json, with what its class adds, and the files it is in.

Called by cleave.perf.model.model_shape. What is hard: models with pictures or sound have the part
under four names; ModelOpt's quantisation may be in a file of its own; and encoders and reward
models look like generators but for their architecture.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from cleave.perf.model.config_classes import find_class
from cleave.perf.model.family_table import FAMILIES, OUTER_TYPES
from cleave.perf.model.hf_config import REMEDY, ConfigFields, ModelConfigError, decode_config

_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Fields that hold the language model's part."""
_SHARED_FIELDS = (
    *("dtype", "torch_dtype", "quantization_config", "compression_config"),
    "tie_word_embeddings",
)
"""Fields of the top level that also apply to its text part."""
UNKNOWN_TYPE = "plans do not know how its layers are built"
_MAX_LEVELS = 3
QUANTIZATION_FILE = "hf_quant_config.json"
_GENERATORS = re.compile(
    r"(ForCausalLM(V)?|ForConditionalGeneration|LMHeadModel|ChatModel|ChatGLMModel|AquilaModel"
    r"|LMModel|RealtimeGeneration|OmniModel|ForBlockDiffusion)$"
)
_OTHERS = re.compile(
    r"(Model|ForMaskedLM|Classification|Reward\w*|Retrieval|EmbeddingModel|ForRanking|ColBERT"
    r"|Forecast\w*|Segmentation|Detection|Encoder|Projection)$"
)

_NO_GENERATOR = "an encoder, embedding, classification or reward model, which generates no tokens"


def read_file(path: Path) -> ConfigFields:
    """The language model's part of the config.json at `path`, with the quantisation that a file
    beside it states. Raises ModelConfigError."""
    config = decode_config(_read_text(path))
    beside = path.with_name(QUANTIZATION_FILE)
    if isinstance(config, Mapping) and not config.get("quantization_config") and beside.is_file():
        try:
            quantization = decode_config(_read_text(beside))
        except ModelConfigError as error:
            raise ModelConfigError(f"{QUANTIZATION_FILE} {error}") from error
        config = with_quantization(config, quantization)
    return select_language_part(config)


def with_quantization(config: Mapping[str, object], quantization: object) -> Mapping[str, object]:
    """A config with the content of hf_quant_config.json, which counts where the config has no
    quantisation of its own (vLLM 0.32, `get_config`)."""
    if config.get("quantization_config") or quantization is None:
        return config
    return {**config, "quantization_config": quantization}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelConfigError(f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelConfigError(f"is no JSON: {error}") from error


def select_language_part(config: object) -> ConfigFields:
    """The fields of a decoded config, or those of its language model's part if it has one, with the
    defaults of its class. Raises ModelConfigError."""
    if not isinstance(config, Mapping):
        raise ModelConfigError("holds no object; a config.json starts with {")
    fields = ConfigFields(config)
    if not fields.get_flag("is_causal", default=True):
        raise fields.build_error("is_causal", f"it is {_NO_GENERATOR}; plans are for generators")
    if fields.get_flag("is_encoder_decoder"):
        raise fields.build_error("is_encoder_decoder", "only decoder-only models are served")
    _check_generates(fields)
    if "model_type" not in config and "dim" in config:
        remedy = "it is a field of Mistral's params.json; give the config.json beside that"
        raise fields.build_error("dim", remedy)
    part, part_type = fields, fields.get_text("model_type") or ""
    for _ in range(_MAX_LEVELS):
        known = find_class(part_type)
        names = [known.part, *_PARTS] if known.part else [*_PARTS]
        name = next((each for each in names if part.values.get(each) is not None), "")
        inner = part.get_object(name) if name else None
        if inner is None and not known.part:
            break
        if not part_type:
            break
        if part_type in FAMILIES:
            raise part.build_error(name, f"{part_type} has no such part; keep one of both")
        if part_type not in OUTER_TYPES:
            raise part.build_error("model_type", f"{UNKNOWN_TYPE}; {REMEDY}")
        if inner is None and "hidden_size" not in part.values:
            fault = f"{part.path}{known.part} is missing"
            raise ModelConfigError(f"{fault}; add it to the config, as it describes the layers")
        # The first files of Qwen2-VL have the fields of its part beside it.
        values = inner.values if inner else {**part.values, "model_type": None}
        shared = {each: config.get(each) for each in _SHARED_FIELDS if values.get(each) is None}
        merged = {**values, **{each: value for each, value in shared.items() if value is not None}}
        part = ConfigFields(merged, inner.path if inner else part.path)
        part_type = part.get_text("model_type") or known.part_type
    else:
        raise ModelConfigError(f"{part.path.removesuffix('.')} holds another part; keep one level")
    if not part_type:
        fault = f"{part.path}model_type is missing"
        raise ModelConfigError(f"{fault}; add it to the config, as it says how layers are built")
    known = find_class(part_type)
    values = {**part.values, "model_type": part_type or None}
    return ConfigFields(values, part.path, known.defaults, known.other_names)


def _check_generates(config: ConfigFields) -> None:
    """Raises ModelConfigError for a model that generates no tokens."""
    listed = config.get_list("architectures") or ()
    names = [each for each in listed if isinstance(each, str)]
    if not any(map(_GENERATORS.search, names)) and any(map(_OTHERS.search, names)):
        remedy = f"it is {_NO_GENERATOR}; plans are for generators"
        raise config.build_error("architectures", remedy)
    known = find_class(config.get_text("model_type") or "").architectures
    if names and known and not set(names) & set(known):
        remedy = f"of this model_type plans know {', '.join(known[:4])}"
        raise config.build_error("architectures", remedy)
