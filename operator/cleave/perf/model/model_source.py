"""The dimensions of a deployment's model: from spec.model.config, a folder, or the model table.

Called by the planner, the checks and the builders of manifests, so that all of them plan, check and
size one model. `find_config_fault` is for admission, `with_config_map` for the operator.
"""

from collections.abc import Mapping
from pathlib import Path, PurePath

from pydantic import ValidationError

from cleave.api.faults import format_faults
from cleave.api.model import MAX_CONFIG_LENGTH, ModelConfig, ModelSpec
from cleave.perf.model import config_parts, hf_config, known_models, model_report, model_shape
from cleave.perf.model.hf_config import ModelConfigError
from cleave.perf.model.model_shape import ModelShape, UnknownModelError

REMEDY = "put its config.json into spec.model.config, inline or in a ConfigMap"
"""What to do about a model that is not known."""
NOT_IN_TABLE = "it is not in Cleave's model table"


def load_shape(model: ModelSpec) -> ModelShape:
    """The model's dimensions, also of one in a folder. Raises UnknownModelError with the reason,
    which concerns `model.shape_field`."""
    has_folder = model.folder is not None or Path(model.locator).exists()
    if model.config is None and has_folder:
        return model_shape.load_shape(model.locator, model.dtype or "auto")
    return load_known_shape(model)


def load_known_shape(model: ModelSpec) -> ModelShape:
    """The model's dimensions from the spec or the table; no file is read. Raises UnknownModelError
    with the reason, which concerns `model.shape_field`."""
    config, dtype = model.config, model.dtype or "auto"
    if config is not None and config.inline is not None:
        return model_shape.from_config(_get_name(model), config.inline, dtype)
    if config is not None and config.config_map_key_ref is not None:
        name = config.config_map_key_ref.name
        why = "is read by the operator only; set spec.model.config.inline instead"
        raise UnknownModelError(f"the ConfigMap {name} {why}")
    if model.folder is not None:
        raise UnknownModelError("it is a folder, which the operator does not read")
    known = known_models.find_config(model.locator)
    if known is None:
        raise UnknownModelError(NOT_IN_TABLE)
    return model_shape.from_config(*known, dtype)


def needs_report(model: ModelSpec) -> bool:
    """Whether only an engine can say what the model's dimensions are, as far as the operator knows:
    the resource brings no config, and the table does not have it."""
    if model.config is not None:
        return False
    return model.folder is not None or known_models.find_config(model.locator) is None


def with_config(model: ModelSpec, config: Mapping[str, object]) -> ModelSpec:
    """The model with a config.json as `config.inline`. Raises ModelConfigError when it is not
    usable."""
    try:
        own = ModelConfig.model_validate({"inline": dict(config)})
        changed = model.model_copy(update={"config": own})
        load_shape(changed)
    except ValidationError as error:
        fault = format_faults(error, ModelConfig)[0].removeprefix("inline: ")
        raise ModelConfigError(fault) from error
    except UnknownModelError as error:
        raise ModelConfigError(str(error)) from error
    return changed


def find_config_fault(model: ModelSpec) -> str | None:
    """What is wrong with spec.model.config.inline, as `path: fault`; None: nothing."""
    if model.config is None or model.config.inline is None:
        return None
    try:
        load_shape(model)
    except UnknownModelError as error:
        return f"{model.shape_field}: {error}"
    return None


def with_config_map(model: ModelSpec, data: Mapping[str, str]) -> ModelSpec:
    """The model with the content of the ConfigMap that its config refers to (`data`) as
    `config.inline`, or without a config where that is optional and missing. Raises
    ModelConfigError, which names the ConfigMap and its key."""
    reference = model.config.config_map_key_ref if model.config else None
    if reference is None:
        return model
    where = f"ConfigMap {reference.name}"
    if reference.key not in data:
        if reference.optional:
            return model.model_copy(update={"config": None})
        raise ModelConfigError(f"{where} has no key {reference.key}; add it")
    key = beside = config_parts.QUANTIZATION_FILE
    try:
        quantization = _decode_entry(data[beside]) if beside in data else None
        key = reference.key
        config = config_parts.with_quantization(_decode_entry(data[key]), quantization)
        return with_config(model, model_report.shorten_lists(config))
    except ModelConfigError as error:
        raise ModelConfigError(f"{where}, key {key}: {error}") from error


def _decode_entry(text: str) -> Mapping[str, object]:
    """The object that an entry of a ConfigMap holds. Raises ModelConfigError."""
    if len(text) > _MAX_TEXT_LENGTH:
        raise ModelConfigError(f"has {len(text):,} characters; a config.json is shorter")
    # An inline config has no infinite numbers, and no plan reads one.
    decoded = hf_config.decode_config(text, parse_constant=lambda _: None)
    if not isinstance(decoded, Mapping):
        raise ModelConfigError("must be an object")
    return decoded


_MAX_TEXT_LENGTH = 4 * MAX_CONFIG_LENGTH
"""Of a text with indentation, before it is decoded."""


def _get_name(model: ModelSpec) -> str:
    """Published times and profiles are found by it, so a model in the table has the table's."""
    known = known_models.find_config(model.locator) if model.folder is None else None
    return known[0] if known else PurePath(model.locator).name
