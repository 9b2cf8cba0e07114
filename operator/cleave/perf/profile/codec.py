"""Strict conversion between dataclasses and plain objects with camelCase keys.

Used by cleave.perf.profile.profile, which emulated engines import: standard library only, no
pydantic.
"""

import dataclasses
from collections.abc import Mapping
from typing import get_args, get_origin, get_type_hints

_SCALAR_NAMES: dict[object, str] = {int: "a whole number", float: "a number", str: "text"}


class InvalidProfileError(ValueError):
    """An unusable profile; the message is one line."""


def encode(value: object) -> object:
    """Convert to plain dicts, lists and scalars; fields with their default value are omitted."""
    if dataclasses.is_dataclass(value):
        own = type(value).__annotations__
        # Inherited fields come last: first what was measured, then the duration.
        parts = sorted(dataclasses.fields(value), key=lambda part: part.name not in own)
        return {
            to_camel_case(part.name): encode(getattr(value, part.name))
            for part in parts
            if getattr(value, part.name) != part.default
        }
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    return value


def decode(expected: object, value: object, where: str) -> object:
    """`value` as the type `expected`: a dataclass, tuple of them, mapping of text, or a scalar.
    `where` is the path of `value`. Raises InvalidProfileError if it is not exactly of that type."""
    if value is not None and type(None) in get_args(expected):
        expected = next(kind for kind in get_args(expected) if kind is not type(None))
    if isinstance(expected, type) and dataclasses.is_dataclass(expected):
        return _decode_fields(expected, value, where)
    if get_origin(expected) is tuple:
        if not isinstance(value, list):
            raise _build_type_error(where, value, "a list")
        item = get_args(expected)[0]
        return tuple(decode(item, each, f"{where}[{i}]") for i, each in enumerate(value))
    if get_origin(expected) is Mapping:
        if not isinstance(value, dict):
            raise _build_type_error(where, value, "an object")
        return {str(key): str(each) for key, each in value.items()}
    return _decode_scalar(expected, value, where)


def _decode_fields(expected: type, value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise _build_type_error(where, value, "an object")
    hints = get_type_hints(expected)
    parts = {to_camel_case(part.name): part for part in dataclasses.fields(expected)}
    if unknown := [key for key in value if key not in parts]:
        names = ", ".join(parts)
        raise InvalidProfileError(f"{_join_path(where, unknown[0])}: unknown field; known: {names}")
    fields = {}
    for key, part in parts.items():
        if key in value:
            fields[part.name] = decode(hints[part.name], value[key], _join_path(where, key))
        elif part.default is part.default_factory is dataclasses.MISSING:
            raise InvalidProfileError(f"{_join_path(where, key)}: is missing")
    return expected(**fields)


def _decode_scalar(expected: object, value: object, where: str) -> object:
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise _build_type_error(where, "a huge number", "a number") from None
    if expected is str and value.__class__.__module__ == "datetime":
        return str(value)  # YAML parses an unquoted date as a date
    if type(value) is not expected:
        raise _build_type_error(where, value, _SCALAR_NAMES[expected])
    return value


def _build_type_error(where: str, value: object, expected: str) -> InvalidProfileError:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number with too many digits, a recursive list
        text = type(value).__name__
    text = text if len(text) <= 60 else text[:57] + "..."
    return InvalidProfileError(f"{where or 'profile'}: must be {expected} (got {text})")


def _join_path(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def to_camel_case(name: str) -> str:
    """Convert kv_capacity_tokens to kvCapacityTokens."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
