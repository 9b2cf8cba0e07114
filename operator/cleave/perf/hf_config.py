"""Reads the fields of a Hugging Face config.json: checked, bounded, one clear line per fault.

Called by cleave.perf.model and cleave.perf.quantization. Standard library only, as they are.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_LARGEST = 10**9
"""No dimension of a model is larger; what is, is a mistake."""
_LONGEST_SHOWN = 40
_SHARED = ("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings")
"""What a multimodal config says for its text part too."""


class ConfigError(ValueError):
    """A config.json that no model can be made of; one line that names the field and the remedy."""


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of the config."""

    values: Mapping[str, object]
    path: str = ""
    """Where it stands in the file, with a dot at the end; empty: the file itself."""

    def number(self, *names: str) -> int:
        """The first of these fields that is stated; a whole number of at least 1."""
        value = self.optional_number(*names)
        if value is None:
            instead = f" (or {', '.join(names[1:])})" if names[1:] else ""
            raise ConfigError(f"{self.path}{names[0]}{instead} is missing; add it to the config")
        return value

    def optional_number(self, *names: str, least: int = 1) -> int | None:
        """The same, None where no field is stated."""
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
        """True or false."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fault(name, "write true or false")
        return value

    def text(self, *names: str) -> str | None:
        """The first of these fields that is stated."""
        for name in names:
            value = self.values.get(name)
            if value is None:
                continue
            if not isinstance(value, str):
                raise self.fault(name, "write a text")
            return value
        return None

    def part(self, name: str) -> "Fields | None":
        """An object inside this one."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fault(name, "write an object")
        return Fields(value, f"{self.path}{name}.")

    def fault(self, name: str, remedy: str) -> ConfigError:
        """What to raise about a field."""
        shown = repr(self.values.get(name))
        if len(shown) > _LONGEST_SHOWN:
            shown = shown[:_LONGEST_SHOWN] + "..."
        return ConfigError(f"{self.path}{name} is {shown}; {remedy}")


def read(path: Path) -> Fields:
    """The language model's part of a config.json. Raises ConfigError."""
    try:
        # Number tokens become text first: Python refuses to convert numbers of many digits.
        config = json.loads(path.read_text(encoding="utf-8"), parse_int=_whole)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError("is nested too deeply; a config has a few levels") from error
    except ValueError as error:
        raise ConfigError(f"is no JSON: {error}") from error
    return language_part(config)


def language_part(config: object) -> Fields:
    """The fields of a decoded config, those of `text_config` where there is one.

    One level only: a part that contains itself is refused. Raises ConfigError.
    """
    if not isinstance(config, Mapping):
        raise ConfigError("holds no object; a config.json starts with {")
    whole = Fields(config)
    part = whole.part("text_config")
    if part is None:
        return whole
    if part.values.get("text_config") is not None:
        raise ConfigError("text_config holds another text_config; keep one level")
    shared = {name: config.get(name) for name in _SHARED if part.values.get(name) is None}
    return Fields({**part.values, **shared}, part.path)


def _whole(digits: str) -> int:
    """An integer, cut to one that is refused later when it has more digits than any dimension."""
    return int(digits[:20])
