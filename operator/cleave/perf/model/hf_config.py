"""Reads and validates the fields of a Hugging Face config.json; one clear line per error.

Called by cleave.perf.model.model_shape and cleave.perf.model.quantization. Standard library only,
as they are.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_LARGEST = 10**9
"""Upper bound of any dimension of a model; larger numbers are mistakes."""
_LONGEST_SHOWN = 40
_SHARED = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
"""Fields of a multimodal config's top level that also apply to its text part."""


class ConfigError(ValueError):
    """An unusable config.json; the message is one line that names the field and the remedy."""


@dataclass(frozen=True, slots=True)
class Fields:
    """A JSON object of the config, with typed access to its fields."""

    values: Mapping[str, object]
    path: str = ""
    """Path of the object in the file, with a dot at the end; empty: the top level."""

    def number(self, *names: str) -> int:
        """The first present one of these fields, an integer of at least 1. Raises ConfigError."""
        value = self.optional_number(*names)
        if value is None:
            instead = f" (or {', '.join(names[1:])})" if names[1:] else ""
            raise ConfigError(f"{self.path}{names[0]}{instead} is missing; add it to the config")
        return value

    def optional_number(self, *names: str, least: int = 1) -> int | None:
        """The same with another minimum; None if no field is present. Raises ConfigError."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise self.fault(name, f"write a whole number of at least {least}")
            if value > _LARGEST:
                raise self.fault(name, f"write a number up to {_LARGEST}")
            return value
        return None

    def flag(self, name: str, default: bool) -> bool:
        """A boolean field. Raises ConfigError."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fault(name, "write true or false")
        return value

    def text(self, *names: str) -> str | None:
        """The first of these text fields that is present; None: none is. Raises ConfigError."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not isinstance(value, str):
                raise self.fault(name, "write a text")
            return value
        return None

    def part(self, name: str) -> "Fields | None":
        """A nested object; None: absent. Raises ConfigError."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fault(name, "write an object")
        return Fields(value, f"{self.path}{name}.")

    def fault(self, name: str, remedy: str) -> ConfigError:
        """The error to raise for the value of a field."""
        text = repr(self.values.get(name))
        if len(text) > _LONGEST_SHOWN:
            text = text[:_LONGEST_SHOWN] + "..."
        return ConfigError(f"{self.path}{name} is {text}; {remedy}")


def read(path: Path) -> Fields:
    """The language model's part of a config.json. Raises ConfigError."""
    try:
        # `_whole` shortens integers first: Python refuses to convert numbers of many digits.
        config = json.loads(path.read_text(encoding="utf-8"), parse_int=_whole)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError("is nested too deeply; a config has a few levels") from error
    except ValueError as error:
        raise ConfigError(f"is no JSON: {error}") from error
    return language_part(config)


def language_part(config: object) -> Fields:
    """The fields of a decoded config, or those of its `text_config` if it has one.

    Nested `text_config` objects are refused. Raises ConfigError.
    """
    if not isinstance(config, Mapping):
        raise ConfigError("holds no object; a config.json starts with {")
    fields = Fields(config)
    part = fields.part("text_config")
    if part is None:
        return fields
    if part.values.get("text_config") is not None:
        raise ConfigError("text_config holds another text_config; keep one level")
    shared = {name: config.get(name) for name in _SHARED if part.values.get(name) is None}
    return Fields({**part.values, **shared}, part.path)


def _whole(digits: str) -> int:
    """An integer from its first 20 digits; longer numbers stay too large and are refused later."""
    return int(digits[:20])
