"""Reads and validates the fields of a Hugging Face config.json; one clear line per error.

Called by cleave.perf.model.model_shape and cleave.perf.model.layers. Standard library only, as they
are.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MAX_DIMENSION = 10**9
"""Upper bound of any dimension of a model; larger numbers are mistakes."""
_MAX_REPR_LENGTH = 40
_SHARED_FIELDS = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
"""Fields of a multimodal config's top level that also apply to its text part."""


class ModelConfigError(ValueError):
    """An unusable config.json; the message is one line that names the field and the remedy."""


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """A JSON object of the config, with typed access to its fields."""

    values: Mapping[str, object]
    path: str = ""
    """Path of the object in the file, with a dot at the end; empty: the top level."""

    def get_number(self, *names: str) -> int:
        """The first present one of these fields, an integer of at least 1. Raises ConfigError."""
        value = self.get_optional_number(*names)
        if value is None:
            instead = f" (or {', '.join(names[1:])})" if names[1:] else ""
            missing = f"{self.path}{names[0]}{instead} is missing"
            raise ModelConfigError(f"{missing}; add it to the config")
        return value

    def get_optional_number(self, *names: str, least: int = 1) -> int | None:
        """The same with another minimum; None if no field is present. Raises ConfigError."""
        name, value = self._find(names)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.build_error(name, f"write a whole number of at least {least}")
        if value > _MAX_DIMENSION:
            raise self.build_error(name, f"write a number up to {_MAX_DIMENSION}")
        return value

    def get_flag(self, name: str, default: bool) -> bool:
        """A boolean field. Raises ConfigError."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.build_error(name, "write true or false")
        return value

    def get_text(self, *names: str) -> str | None:
        """The first of these text fields that is present; None: none is. Raises ConfigError."""
        name, value = self._find(names)
        if value is None or isinstance(value, str):
            return value
        raise self.build_error(name, "write a text")

    def get_object(self, name: str) -> "ConfigFields | None":
        """A nested object; None: absent. Raises ConfigError."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.build_error(name, "write an object")
        return ConfigFields(value, f"{self.path}{name}.")

    def _find(self, names: Sequence[str]) -> tuple[str, object]:
        """Name and value of the first of these fields that is present; the value None: none is."""
        name = next((name for name in names if self.values.get(name) is not None), names[0])
        return name, self.values.get(name)

    def build_error(self, name: str, remedy: str) -> ModelConfigError:
        """The error to raise for the value of a field."""
        text = repr(self.values.get(name))
        if len(text) > _MAX_REPR_LENGTH:
            text = text[:_MAX_REPR_LENGTH] + "..."
        return ModelConfigError(f"{self.path}{name} is {text}; {remedy}")


def read_config(path: Path) -> ConfigFields:
    """The language model's part of a config.json. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelConfigError(f"cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelConfigError(f"is no JSON: {error}") from error
    return select_language_part(decode_config(text))


def decode_config(text: str, parse_constant: Callable[[str], object] = float) -> object:
    """The value that the text of a config.json encodes. `parse_constant`: the value of `NaN`,
    `Infinity` and `-Infinity`, which are no JSON, but which Hugging Face's library writes (in
    `time_step_limit` of models with Mamba-2 layers). Raises ConfigError."""
    try:
        # Python refuses to convert numbers of many digits; the first 20 are too large, too.
        return json.loads(
            text, parse_int=lambda digits: int(digits[:20]), parse_constant=parse_constant
        )
    except RecursionError as error:
        raise ModelConfigError("is nested too deeply; a config has a few levels") from error
    except ValueError as error:
        raise ModelConfigError(f"is no JSON: {error}") from error


def select_language_part(config: object) -> ConfigFields:
    """The fields of a decoded config, or those of its `text_config` if it has one. Nested
    `text_config` objects are refused. Raises ConfigError."""
    if not isinstance(config, Mapping):
        raise ModelConfigError("holds no object; a config.json starts with {")
    fields = ConfigFields(config)
    part = fields.get_object("text_config")
    if part is None:
        return fields
    if part.values.get("text_config") is not None:
        raise ModelConfigError("text_config holds another text_config; keep one level")
    shared = {name: config.get(name) for name in _SHARED_FIELDS if part.values.get(name) is None}
    return ConfigFields({**part.values, **shared}, part.path)
