"""Writes what the installed vLLM reads from requests: `.venv/bin/python scripts/vllm_fields.py`.

From vLLM's own routes and request classes into `operator/cleave/gateway/http/vllm_fields.json`,
which `cleave.gateway.http.engine_fields` loads; run it when vLLM's version changes. What is hard:
requests contain objects of other classes, and plug-ins read what clients put into `vllm_xargs`. So
classes are followed into their members, and vLLM's sources are searched for names that are looked
up in extra arguments and in header fields.
"""

import ast
import dataclasses
import importlib
import json
import pkgutil
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typing_extensions
import vllm
import vllm.entrypoints
from fastapi import APIRouter
from pydantic import BaseModel

from cleave.gateway.app import routes

OUTPUT = Path("operator/cleave/gateway/http/vllm_fields.json")
_SOURCES = Path(vllm.__file__).parent
_EXTRA_ARGUMENTS = frozenset(("extra", "extra_args", "vllm_xargs"))
"""What vLLM's sources call the arguments that clients give in `vllm_xargs`."""
_MEDIA_MEMBER = "uuid"
"""Only media have it."""
_HEADS = frozenset(("headers", "request_headers"))
_UNREAD = ("benchmarks", "entrypoints/cli", "entrypoints/scale_out")
"""Folders of sources that read no request of these paths."""


def main() -> None:
    """Write the file."""
    OUTPUT.write_text(json.dumps(describe_requests(), indent=1) + "\n")


def describe_requests() -> dict[str, Any]:
    """All names that vLLM reads: by path, by class of a member, in extra arguments and heads."""
    bodies = dict(_list_bodies())
    passed_on = routes.COMPLETION_ROUTES + routes.OTHER_ROUTES
    by_path, media, members = {}, {}, set()
    for path in sorted(route.path.decode() for route in passed_on):
        classes = list(_list_classes(bodies[path]))
        by_path[path] = sorted({name for each in classes for name in _list_names(each)})
        media[path] = sorted({name for each in classes for name in _list_media(each)})
        members |= {each for kind in classes for each in _list_member_classes(kind, set())}
    arguments, headers = _search_sources()
    return {
        "version": vllm.__version__,
        "paths": by_path,
        "media": media,
        "members": sorted({name for each in members for name in _list_names(each)}),
        "extra_arguments": sorted(arguments),
        "headers": sorted(headers),
    }


def _list_bodies() -> Iterator[tuple[str, Any]]:
    """(path, type of the body) of each POST route."""
    for module in pkgutil.walk_packages(vllm.entrypoints.__path__, "vllm.entrypoints."):
        if not module.name.endswith("api_router"):
            continue
        for router in vars(importlib.import_module(module.name)).values():
            for route in router.routes if isinstance(router, APIRouter) else ():
                field = getattr(route, "body_field", None)
                if field is not None:
                    yield route.path, field.field_info.annotation


def _list_classes(kind: Any) -> Iterator[Any]:  # noqa: ANN401
    """The classes with members in a type."""
    kind = getattr(kind, "__value__", kind)
    if _has_members(kind):
        yield kind
    for argument in typing.get_args(kind):
        yield from _list_classes(argument)


def _has_members(kind: Any) -> bool:  # noqa: ANN401
    return isinstance(kind, type) and (
        issubclass(kind, BaseModel)
        or dataclasses.is_dataclass(kind)
        or typing_extensions.is_typeddict(kind)
    )


def _list_hints(kind: Any) -> dict[str, Any]:  # noqa: ANN401
    """The members that a request may give, with their types."""
    if issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    hints = typing_extensions.get_type_hints(kind)
    if dataclasses.is_dataclass(kind):
        given = {field.name for field in dataclasses.fields(kind) if field.init}
        return {name: hint for name, hint in hints.items() if name in given}
    return hints


def _list_names(kind: Any) -> Iterator[str]:  # noqa: ANN401
    """The names of a class's members in JSON."""
    fields = kind.model_fields if issubclass(kind, BaseModel) else {}
    for name in _list_hints(kind):
        yield name
        if name in fields and fields[name].alias:
            yield fields[name].alias


def _list_media(kind: Any) -> Iterator[str]:  # noqa: ANN401
    """The fields of a request that may contain media."""
    for name, hint in _list_hints(kind).items():
        classes = list(_list_classes(hint))
        inside = [each for kind in classes for each in _list_member_classes(kind, set())]
        if any(_MEDIA_MEMBER in _list_names(each) for each in (*classes, *inside)):
            yield name


def _list_member_classes(kind: Any, seen: set[Any]) -> Iterator[Any]:  # noqa: ANN401
    """The classes of a class's members, and of theirs, other than those `seen`, which grows."""
    for hint in _list_hints(kind).values():
        for each in _list_classes(hint):
            if each not in seen:
                seen.add(each)
                yield each
                yield from _list_member_classes(each, seen)


def _search_sources() -> tuple[set[str], set[str]]:
    """(names of extra arguments, names of header fields) that vLLM's sources read."""
    arguments: set[str] = set()
    headers: set[str] = set()
    for path in _SOURCES.rglob("*.py"):
        text = path.read_text()
        is_reader = ".extra_args" in text or ".vllm_xargs" in text
        is_unread = path.relative_to(_SOURCES).as_posix().startswith(_UNREAD)
        if is_unread or not (is_reader or "headers" in text or "_HEADER" in text):
            continue
        module = ast.parse(text)
        if is_reader:
            arguments.update(_find_look_ups(module, _EXTRA_ARGUMENTS))
        headers.update(name.lower() for name in _find_headers(module))
    return arguments, headers


def _find_headers(module: ast.Module) -> Iterator[str]:
    """Names that are looked up in heads, and constants that are called names of header fields."""
    yield from _find_look_ups(module, _HEADS)
    for node in module.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str(value))):
                if "_HEADER" in name and value.replace("-", "").isalpha():
                    yield value


def _find_look_ups(module: ast.Module, holders: frozenset[str]) -> Iterator[str]:
    """Texts in `holder.get("text")`, `holder["text"]` and `"text" in holder`."""
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Attribute(value=holder, attr="get"), args=[key, *_]):
                pass
            case ast.Subscript(value=holder, slice=key):
                pass
            case ast.Compare(left=key, ops=[ast.In()], comparators=[holder]):
                pass
            case _:
                continue
        name = holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", "")
        if name in holders and isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


if __name__ == "__main__":
    main()
