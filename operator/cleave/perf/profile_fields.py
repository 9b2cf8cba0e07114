"""Dataclasses to plain objects with camelCase keys and back, strictly.

Used by cleave.perf.profile, which emulated engines import: standard library only, no pydantic.
"""

import dataclasses
from collections.abc import Mapping
from typing import get_args, get_origin, get_type_hints

_SCALARS: dict[object, str] = {int: "a whole number", float: "a number", str: "text"}


class InvalidProfileError(ValueError):
    """A profile is not usable; the message is one line."""


def encode(value: object) -> object:
    """Plain dicts, lists and scalars; fields that have their default are left out."""
    if dataclasses.is_dataclass(value):
        own = type(value).__annotations__
        # Inherited fields last: what was measured, then how long it took.
        parts = sorted(dataclasses.fields(value), key=lambda part: part.name not in own)
        return {
            camel(part.name): encode(getattr(value, part.name))
            for part in parts
            if getattr(value, part.name) != part.default
        }
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    return value


def decode(wanted: object, value: object, where: str) -> object:
    """`value` as the type `wanted`: a dataclass, tuple of them, mapping of text, or a scalar.

    `where` is the path of `value`. Raises InvalidProfileError on whatever is not exactly that.
    """
    if value is not None and type(None) in get_args(wanted):
        wanted = next(kind for kind in get_args(wanted) if kind is not type(None))
    if isinstance(wanted, type) and dataclasses.is_dataclass(wanted):
        return _decode_fields(wanted, value, where)
    if get_origin(wanted) is tuple:
        if not isinstance(value, list):
            raise _wrong(where, value, "a list")
        item = get_args(wanted)[0]
        return tuple(decode(item, each, f"{where}[{i}]") for i, each in enumerate(value))
    if get_origin(wanted) is Mapping:
        if not isinstance(value, dict):
            raise _wrong(where, value, "an object")
        return {str(key): str(each) for key, each in value.items()}
    return _decode_scalar(wanted, value, where)


def _decode_fields(wanted: type, value: object, where: str) -> object:
    if not isinstance(value, dict):
        raise _wrong(where, value, "an object")
    hints = get_type_hints(wanted)
    parts = {camel(part.name): part for part in dataclasses.fields(wanted)}
    if unknown := [key for key in value if key not in parts]:
        known = ", ".join(parts)
        raise InvalidProfileError(f"{_join(where, unknown[0])}: unknown field; known: {known}")
    given = {}
    for key, part in parts.items():
        if key in value:
            given[part.name] = decode(hints[part.name], value[key], _join(where, key))
        elif part.default is part.default_factory is dataclasses.MISSING:
            raise InvalidProfileError(f"{_join(where, key)}: is missing")
    return wanted(**given)


def _decode_scalar(wanted: object, value: object, where: str) -> object:
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise _wrong(where, "a huge number", "a number") from None
    if wanted is str and value.__class__.__module__ == "datetime":
        return str(value)  # YAML reads an unquoted date as one
    if type(value) is not wanted:
        raise _wrong(where, value, _SCALARS[wanted])
    return value


def _wrong(where: str, value: object, wanted: str) -> InvalidProfileError:
    try:
        shown = repr(value)
    except (ValueError, RecursionError):  # a number with too many digits, a list inside itself
        shown = type(value).__name__
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return InvalidProfileError(f"{where or 'profile'}: must be {wanted} (got {shown})")


def _join(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def camel(name: str) -> str:
    """kv_capacity_tokens as kvCapacityTokens."""
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)
