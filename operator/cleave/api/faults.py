"""Converts validation errors of pydantic to messages for users.

Called by cleave.api.manifest and the webhook. What is hard: each fault is one line with the path of
its field as it is written in YAML, and similar names are suggested for unknown ones.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cleave.api.base import RULES_BROKEN, ValidationRule

_MAX_VALUE_LENGTH = 60
_MAX_FAULTS = 100
_MAX_NAME_LENGTH = 100
"""Similar names are searched for so many characters of one, which takes 0.03 ms; a name may have a
million."""
_WITH_EXPONENT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d{1,3}")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?")
_WITH_UNIT = re.compile(r"[+-]?\d*\.?\d+ ?[A-Za-z]+")
_PERCENTAGE = re.compile(r"(\d+(?:\.\d*)?) ?%")
_UNITS = {
    re.compile("Ms$"): "milliseconds",
    re.compile("(?<!Per)S$|Seconds$"): "seconds",
    re.compile("Gib$"): "GiB",
    re.compile("Watts$"): "watts",
}
"""Units of numbers, by the field's name."""
_SHARE = re.compile("^attainment$|[sS]hare$")
"""Names of fields with a share, 0 to 1."""

_MESSAGES = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    "bool_type": "must be true or false",
    "string_type": "must be text",
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be an object"),
    "list_type": "must be a list",
}
"""What is wrong, by pydantic's type of error; the value is added."""
_ELSEWHERE = {
    ("affinity", "podAffinity"): ": Cleave sets affinity between pods itself",
    ("affinity", "podAntiAffinity"): ": Cleave sets affinity between pods itself",
    ("model", "servedName"): "; list further names in spec.gateway.modelAliases",
}
"""Where something belongs that others write here, by the last names of its path."""


def format_faults(error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Return one line `path: what is wrong` per fault of a document of type `root`, for the first
    _MAX_FAULTS of them."""
    details = error.errors(include_url=False)
    listed: set[tuple[str | int, ...]] = set()
    lines = [
        line for detail in details[:_MAX_FAULTS] for line in _format_fault(detail, root, listed)
    ]
    if len(details) > _MAX_FAULTS:
        lines.append(f"and {len(details) - _MAX_FAULTS} more faults")
    return lines


def format_value(value: object) -> str:
    """Format a value for a message, truncated if it is long."""
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else text[: _MAX_VALUE_LENGTH - 3] + "..."


def _format_fault(
    detail: ErrorDetails, root: type[BaseModel], listed: set[tuple[str | int, ...]]
) -> Iterator[str]:
    """`listed`: paths whose known fields an earlier line names."""
    path, context = detail["loc"], detail.get("ctx", {})
    if detail["type"] == RULES_BROKEN:
        rules: list[ValidationRule] = context["rules"]
        for rule, offenders in zip(rules, context["offenders"], strict=True):
            path_text = _format_path((*path, *rule.field.split(".")) if rule.field else path)
            got = f" (got {', '.join(map(str, offenders))})" if offenders else ""
            yield f"{path_text}: {rule.message}{got}" if path_text else f"{rule.message}{got}"
        return
    yield f"{_format_path(path)}: {_explain(detail, context, root, listed)}"


def _explain(
    detail: ErrorDetails,
    context: Mapping[str, Any],
    root: type[BaseModel],
    listed: set[tuple[str | int, ...]],
) -> str:
    got = "" if _is_secret(detail["loc"]) else f" (got {format_value(detail['input'])})"
    kind = detail["type"]
    if kind in _MESSAGES:
        is_number = kind.startswith("int")
        hint = (
            _explain_text(detail)
            if is_number
            else _explain_reference(kind, detail["input"], detail["loc"])
        )
        return _MESSAGES[kind] + got + hint
    match kind:
        case "missing":
            return "required"
        case "extra_forbidden":
            return _explain_unknown_field(detail["loc"], root, listed)
        case "enum" | "literal_error":
            return _format_choices(detail["input"], context["expected"]) + got
        case "greater_than":
            return f"must be > {_format_bound(context['gt'])}{got}"
        case "greater_than_equal":
            return f"must be >= {_format_bound(context['ge'])}{got}"
        case "less_than_equal":
            return f"must be <= {_format_bound(context['le'])}{got}{_explain_share(detail)}"
        case "float_type" | "finite_number":
            return "must be a number" + got + _explain_text(detail)
        case "too_long":
            return f"must have at most {context['max_length']} entries"
        case "too_short":
            return f"must have at least {context['min_length']} entry"
        case "string_too_long":
            return f"must be at most {context['max_length']} characters long"
        case "string_too_short":
            return "must not be empty"
        case "string_pattern_mismatch":
            return f"must match {context['pattern']}{got}"
    return detail["msg"] + got


def _format_bound(bound: float) -> str:
    """Format a bound without an exponent if it is a whole number."""
    return f"{bound:,.0f}" if bound == round(bound) else f"{bound:g}"


def _explain_text(detail: ErrorDetails) -> str:
    """Explain that numbers in quotes or with a unit are text, as those such as 1e9 are for YAML
    1.1."""
    value, is_whole = detail["input"], detail["type"].startswith("int")
    if not isinstance(value, str) or len(value) > _MAX_VALUE_LENGTH:
        return ""
    field = str(detail["loc"][-1])
    unit = next((unit for names, unit in _UNITS.items() if names.search(field)), None)
    if unit and _WITH_UNIT.fullmatch(value):
        return f"; write the number of {unit} without a unit"
    if (percentage := _PERCENTAGE.fullmatch(value)) and _SHARE.search(field):
        return f"; write {float(percentage[1]) / 100:g}"
    if _NUMBER.fullmatch(value) and not (is_whole and "." in value):
        return f"; write it without quotes: {value}"
    if _WITH_EXPONENT.fullmatch(value) and math.isfinite(float(value)):
        return f"; YAML reads this as text: write {_format_number(float(value))}"
    return ""


def _explain_share(detail: ErrorDetails) -> str:
    """Explain that a share of 95 is probably meant in percent."""
    value, field = detail["input"], str(detail["loc"][-1])
    is_percentage = isinstance(value, int | float) and 1 < value <= 100
    return f"; write {value / 100:g}" if is_percentage and _SHARE.search(field) else ""


def _format_number(number: float) -> str:
    """Format a number so that YAML 1.1 reads it as one: with an exponent it needs a point."""
    digits, exponent, power = f"{number:.15g}".partition("e")
    return f"{digits}.0e{power}" if exponent and "." not in digits else digits + exponent + power


def _explain_reference(kind: str, value: object, path: Sequence[str | int]) -> str:
    """Explain that a name is written as text where a pod spec has an object with it."""
    if kind != "string_type" or not isinstance(value, Mapping) or [*value] != ["name"]:
        return _find_other_place(path) if isinstance(value, list) else ""
    return f"; write {value['name']} alone"


def _find_other_place(path: Sequence[str | int]) -> str:
    names = [step for step in path if isinstance(step, str)]
    return _ELSEWHERE.get((names[-2], names[-1]), "") if len(names) > 1 else ""


def _is_secret(path: Sequence[str | int]) -> bool:
    """Whether the field may hold a credential, which no message may repeat."""
    return "env" in path and path[-1] != "name"


def _format_choices(value: object, expected: str) -> str:
    names = [name.strip("'") for name in expected.replace(" or ", ", ").split(", ")]
    return f"must be one of {', '.join(names)}{_suggest(value, names)}"


def _explain_unknown_field(
    path: tuple[str | int, ...], root: type[BaseModel], listed: set[tuple[str | int, ...]]
) -> str:
    parent, names = path[:-1], _list_fields_at(path[:-1], root)
    if elsewhere := _find_other_place(path):
        return f"unknown field{elsewhere}"
    if suggestion := _suggest(path[-1], names):
        return f"unknown field{suggestion}"
    if not names or parent in listed:
        return "unknown field"
    listed.add(parent)
    return f"unknown field; known here: {', '.join(names)}"


def _suggest(value: object, names: Sequence[str]) -> str:
    by_lower = {name.lower(): name for name in names}
    name = str(value)[:_MAX_NAME_LENGTH].lower().replace("_", "")
    close = get_close_matches(name, by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""


def _list_fields_at(path: Sequence[str | int], root: type[BaseModel]) -> list[str]:
    """Names, as in YAML, of the fields of the model at a path."""
    model: type[BaseModel] | None = root
    for step in path:
        if isinstance(step, str) and model is not None:
            found = (f.annotation for f in model.model_fields.values() if f.alias == step)
            model = _find_model(next(found, None))
    return [str(f.alias) for f in model.model_fields.values()] if model else []


def _find_model(annotation: object) -> type[BaseModel] | None:
    """The model in a field's type: the type itself, or an element or option of it."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_find_model, get_args(annotation))), None)


def _format_path(path: Sequence[str | int]) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")
