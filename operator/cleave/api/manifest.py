"""Reads LLMDeployments from YAML. Called by the command line and by tests.

What is hard: a user reads the faults, not a stack trace, so every fault of a manifest is found in
one pass and said in one line with the path of its field; names that almost match are suggested.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cleave.api.deployment import KIND, LLMDeployment
from cleave.api.resource import API_VERSION
from cleave.api.shape import RULES_BROKEN, Rule

_LONGEST_VALUE = 60


class ManifestError(ValueError):
    """The manifest is not usable."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = tuple(faults)
        """One line each: `path: what is wrong`."""


def load(source: str | Path) -> LLMDeployment:
    """The one LLMDeployment that YAML text (str) or a file (Path) holds.

    Raises ManifestError when there is none, more than one, or when it is faulty.
    """
    found = load_all(source)
    if len(found) > 1:
        names = ", ".join(deployment.name for deployment in found)
        raise ManifestError([f"holds {len(found)} LLMDeployments ({names}); one is wanted"])
    return found[0]


def load_all(source: str | Path) -> list[LLMDeployment]:
    """All LLMDeployments of YAML documents and of `kind: List` items, at least one.

    Raises ManifestError with every fault of every document.
    """
    documents = list(_items(_documents(source)))
    if not documents:
        raise ManifestError([f"{_label(source)} holds no {KIND}"])
    found: list[LLMDeployment] = []
    faults: list[str] = []
    for document in documents:
        try:
            found.append(validate(document))
        except ManifestError as error:
            prefix = f"{_name(document)}: " if len(documents) > 1 else ""
            faults.extend(prefix + fault for fault in error.faults)
    if faults:
        raise ManifestError(faults)
    return found


def validate(document: object) -> LLMDeployment:
    """An LLMDeployment from decoded YAML or JSON. Raises ManifestError with every fault."""
    if not isinstance(document, Mapping):
        raise ManifestError([f"must be an object with kind: {KIND} (got {_shown(document)})"])
    if faults := list(_identity_faults(document)):
        raise ManifestError(faults)
    try:
        # By way of JSON: what YAML adds (dates, tuples as keys, cycles) is no part of a resource.
        text = json.dumps(document, default=str)
    except (TypeError, ValueError) as error:
        raise ManifestError([f"cannot be written as JSON: {error}"]) from error
    try:
        return LLMDeployment.model_validate_json(text, by_alias=True, by_name=False)
    except ValidationError as error:
        faults = [line for detail in error.errors() for line in _fault(detail)]
        raise ManifestError(faults) from error


def _documents(source: str | Path) -> list[object]:
    try:
        text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ManifestError([f"{source}: {reason}"]) from error
    try:
        return [d for d in yaml.load_all(text, _Loader) if d is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{_label(source)}:{mark.line + 1}" if mark else _label(source)
        raise ManifestError([f"{place}: {error.problem or error.context}"]) from error
    except yaml.YAMLError as error:
        raise ManifestError([f"{_label(source)}: {str(error).splitlines()[0]}"]) from error


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key that is written twice is an error, not the last one's win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key != "<<" and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is written twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _items(documents: Sequence[object]) -> Iterator[object]:
    for document in documents:
        if isinstance(document, Mapping) and document.get("kind") == "List":
            yield from document.get("items") or ()
        else:
            yield document


def _identity_faults(document: Mapping[Any, Any]) -> Iterator[str]:
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if field not in document:
            yield f"{field}: required; write {field}: {wanted}"
        elif document[field] != wanted:
            yield f"{field}: must be {wanted} (got {_shown(document[field])})"


def _fault(detail: ErrorDetails) -> Iterator[str]:
    path, context = detail["loc"], detail.get("ctx", {})
    if detail["type"] == RULES_BROKEN:
        rules: list[Rule] = context["rules"]
        for rule in rules:
            place = _dotted((*path, *rule.field.split(".")) if rule.field else path)
            yield f"{place}: {rule.message}" if place else rule.message
        return
    yield f"{_dotted(path)}: {_sentence(detail, context)}"


def _sentence(detail: ErrorDetails, context: Mapping[str, Any]) -> str:
    got = "" if _is_secret(detail["loc"]) else f" (got {_shown(detail['input'])})"
    match detail["type"]:
        case "missing":
            return "required"
        case "extra_forbidden":
            return _unknown_field(detail["loc"])
        case "enum" | "literal_error":
            return _choices(detail["input"], context["expected"]) + got
        case "greater_than":
            return f"must be > {context['gt']:g}{got}"
        case "greater_than_equal":
            return f"must be >= {context['ge']:g}{got}"
        case "less_than_equal":
            return f"must be <= {context['le']:g}{got}"
        case "int_type" | "int_parsing" | "int_from_float":
            return "must be a whole number" + got
        case "float_type" | "finite_number":
            return "must be a number" + got
        case "string_type":
            return "must be text" + got
        case "model_type" | "model_attributes_type" | "dict_type":
            return "must be an object" + got
        case "list_type":
            return "must be a list" + got
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
        case _:
            return detail["msg"] + got


def _is_secret(path: Sequence[str | int]) -> bool:
    """Whether the field may hold a key or a password, which no fault repeats."""
    return "env" in path and path[-1] != "name"


def _choices(value: object, expected: str) -> str:
    names = [name.strip("'") for name in expected.replace(" or ", ", ").split(", ")]
    return f"must be one of {', '.join(names)}{_suggestion(value, names)}"


def _unknown_field(path: Sequence[str | int]) -> str:
    names = _fields_at(path[:-1])
    known = f"; known here: {', '.join(names)}" if names else ""
    return f"unknown field{_suggestion(path[-1], names) or known}"


def _suggestion(value: object, names: Sequence[str]) -> str:
    by_lower = {name.lower(): name for name in names}
    close = get_close_matches(str(value).lower().replace("_", ""), by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""


def _fields_at(path: Sequence[str | int]) -> list[str]:
    """Names, as in YAML, of the fields of the model at a path."""
    model: type[BaseModel] | None = LLMDeployment
    for step in path:
        if isinstance(step, str) and model is not None:
            model = next(
                (_model_in(f.annotation) for f in model.model_fields.values() if f.alias == step),
                None,
            )
    return [str(f.alias) for f in model.model_fields.values()] if model else []


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The model that a field's type is, or is a list or an option of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)


def _dotted(path: Sequence[str | int]) -> str:
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def _shown(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def _name(document: object) -> str:
    metadata = document.get("metadata") if isinstance(document, Mapping) else None
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    return str(name) if name else "unnamed"


def _label(source: str | Path) -> str:
    return str(source) if isinstance(source, Path) else "manifest"
