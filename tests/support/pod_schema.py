"""Everything that a pod can say: each field of Kubernetes' PodSpec, one at a time."""

import copy
import re
from collections.abc import Iterator
from typing import Any

from kubernetes.client import models

_MAX_DEPTH = 7
_SCALARS: dict[str, object] = {"str": "x", "int": 1, "bool": True, "float": 0.5, "object": "x"}
_PATHS = ("mountPath", "path")
_MERGED = ("containers",)
"""Lists whose first entry gets the field; others get a further entry."""


def list_fields(
    model: str = "V1PodSpec", path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield each field with a value of its type: as a path, and as what it adds to the object."""
    if len(path) >= _MAX_DEPTH:
        return
    kind = getattr(models, model)
    for attribute, name in kind.attribute_map.items():
        declared = kind.openapi_types[attribute]
        here = (*path, name)
        if inner := re.fullmatch(r"List\[(.*)\]", declared):
            yield from _nest(inner[1], here, lambda value: [value])
        elif inner := re.fullmatch(r"Dict\[str, (.*)\]", declared):
            yield here, {"key": _SCALARS.get(inner[1], "x")}
        else:
            yield from _nest(declared, here, lambda value: value)


def _nest(declared: str, here: tuple[str, ...], wrap: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    if not hasattr(models, declared):
        yield here, wrap("/x" if here[-1] in _PATHS else _SCALARS.get(declared, "x"))
        return
    kind = getattr(models, declared)
    is_named = "name" in kind.attribute_map.values()
    yield here, wrap({"name": "x"} if is_named else {})
    for path, value in list_fields(declared, here):
        own = {path[len(here)]: value}
        yield path, wrap({"name": "x", **own} if is_named else own)


def add_field(spec: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The pod spec with what `list_fields` yields of its field `name`."""
    changed, value = copy.deepcopy(spec), copy.deepcopy(value)
    if name in _MERGED and changed.get(name):
        _merge(changed[name][0], {k: v for k, v in value[0].items() if k != "name" or v != "x"})
    else:
        _merge(changed, {name: value})
    return changed


def _merge(target: dict[str, Any], value: dict[str, Any]) -> None:
    for key, each in value.items():
        if isinstance(each, dict) and isinstance(target.get(key), dict):
            _merge(target[key], each)
        elif isinstance(each, list) and isinstance(target.get(key), list) and key != "command":
            target[key] = [*target[key], *each]
        else:
            target[key] = each
