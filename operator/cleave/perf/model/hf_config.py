"""Reads and validates the fields of a Hugging Face config.json; one clear line per error.

Called by the other readers of this package. Standard library only, as they are. What is hard: a
field that changes a model's size and is passed over gives a plan that is wrong without a word, so
every field that was looked at is noted, and `cleave.perf.model.unread_fields` refuses the others.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

REMEDY = "leave out spec.model.config and let the first engine report the model"
"""What helps where Cleave does not know what a config means: an engine knows it."""
_MAX_DIMENSION = 10**9
"""Upper bound of any dimension of a model; larger numbers are mistakes."""
_MAX_REPR_LENGTH = 40
_NO_NAMES: Mapping[str, str] = {}
_NO_VALUES: Mapping[str, object] = {}


class ModelConfigError(ValueError):
    """An unusable config.json; the message is one line that names the field and the remedy."""


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """A JSON object of the config, with typed access to its fields. A field with null, or with
    false where a number, text, list or object belongs, has no value, also none by default."""

    values: Mapping[str, object]
    path: str = ""
    """Path of the object in the file, with a dot at the end; empty: the top level."""
    defaults: Mapping[str, object] = field(default_factory=lambda: _NO_VALUES)
    """Values of the model's class for fields that the file does not have."""
    other_names: Mapping[str, str] = field(default_factory=lambda: _NO_NAMES)
    """A second name of some fields: the class takes either for the same."""
    seen: dict[str, "ConfigFields | None"] = field(default_factory=dict)
    """Fields of the file that were looked at; objects with theirs."""

    def get(self, *names: str) -> object:
        """The value of the first of these fields that has one, or else of the class's default.
        None: there is none, or the file has null or false."""
        value = self._find(names)[1]
        return None if value is False else value

    def get_number(self, *names: str, most: int = _MAX_DIMENSION) -> int:
        """The first present one of these fields, an integer from 1 to `most`. Raises
        ModelConfigError."""
        value = self.get_optional_number(*names, most=most)
        if value is None:
            instead = f" (or {', '.join(names[1:])})" if names[1:] else ""
            missing = f"{self.path}{names[0]}{instead} is missing"
            raise ModelConfigError(f"{missing}; add it to the config")
        return value

    def get_optional_number(
        self, *names: str, least: int = 1, most: int = _MAX_DIMENSION
    ) -> int | None:
        """The same with another minimum; None if no field is present. Raises ModelConfigError."""
        name, value = self._find(names)
        if value is None or value is False:
            return None
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]  # The same for each layer.
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.build_error(name, f"write a whole number of at least {least}")
        if value > most:
            raise self.build_error(name, f"write a number up to {most}")
        return value

    def get_flag(self, name: str, default: bool = False) -> bool:
        """A boolean field. Raises ModelConfigError."""
        name, value = self._find((name,))
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.build_error(name, "write true or false")
        return value

    def get_text(self, *names: str) -> str | None:
        """The first of these text fields that is present; None: none is. Raises
        ModelConfigError."""
        name, value = self._find(names)
        if value is None or value is False:
            return None
        if isinstance(value, str):
            return value
        raise self.build_error(name, "write a text")

    def get_list(self, *names: str) -> Sequence[object] | None:
        """The first of these lists that is present; None: none is. Raises ModelConfigError."""
        name, value = self._find(names)
        if value is None or value is False:
            return None
        if isinstance(value, Sequence) and not isinstance(value, str):
            return value
        raise self.build_error(name, "write a list")

    def get_object(self, name: str) -> "ConfigFields | None":
        """A nested object; None: absent. Raises ModelConfigError."""
        known = self.seen.get(name)
        if known is not None:
            return known
        value = self.values.get(name)
        self.seen[name] = None
        if value is None or value is False:
            return None
        if not isinstance(value, Mapping):
            raise self.build_error(name, "write an object")
        self.seen[name] = part = ConfigFields(value, f"{self.path}{name}.")
        return part

    def has(self, *names: str) -> bool:
        """Whether one of these fields has a value in the file or by default. Notes nothing."""
        every = [each for name in names for each in self._list_names(name)]
        return any(
            self._is_given(each) if each in self.values else each in self.defaults for each in every
        )

    def _is_given(self, name: str) -> bool:
        value = self.values[name]
        return value is not None and value is not False

    def _find(self, names: Sequence[str]) -> tuple[str, object]:
        """Name and value of the first of these fields that is present; the value None: none is."""
        is_null, found = False, None
        every = [each for name in names for each in self._list_names(name)]
        for name in every:
            value = self.values.get(name)
            if value is None:
                is_null |= name in self.values
                continue
            if found is None:
                found = name
            if value == self.values[found]:
                self.seen.setdefault(name)
        if found is not None:
            return found, self.values[found]
        if is_null:
            return names[0], None
        name = next((each for each in every if each in self.defaults), names[0])
        return name, self.defaults.get(name)

    def _list_names(self, name: str) -> Iterator[str]:
        yield name
        if name in self.other_names:
            yield self.other_names[name]

    def build_error(self, name: str, remedy: str) -> ModelConfigError:
        """The error to raise for the value of a field."""
        text = repr(self.values.get(name))
        if len(text) > _MAX_REPR_LENGTH:
            text = text[:_MAX_REPR_LENGTH] + "..."
        return ModelConfigError(f"{self.path}{name} is {text}; {remedy}")


def decode_config(text: str, parse_constant: Callable[[str], object] = float) -> object:
    """The value that the text of a config.json encodes. `parse_constant`: the value of `NaN`,
    `Infinity` and `-Infinity`, which are no JSON, but which Hugging Face's library writes (in
    `time_step_limit` of models with Mamba-2 layers). Raises ModelConfigError."""
    try:
        # Python refuses to convert numbers of many digits; the first 20 are too large, too.
        return json.loads(
            text, parse_int=lambda digits: int(digits[:20]), parse_constant=parse_constant
        )
    except RecursionError as error:
        raise ModelConfigError("is nested too deeply; a config has a few levels") from error
    except ValueError as error:
        raise ModelConfigError(f"is no JSON: {error}") from error
