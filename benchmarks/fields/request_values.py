"""Requests that give each field of vLLM's request classes values of its type. No I/O.

Used by run.py. What is hard: a field's type may be a union of many classes, and what a value means
depends on other fields. So each member of a union has one value, an object has what is required and
then all of its members once, and fields that count together are given together (`BESIDE`).
"""

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import annotated_types
import typing_extensions
from pydantic import BaseModel
from pydantic.fields import FieldInfo

Value = Any
"""Of JSON."""
TOKENS = 6
_TEXT = "the river runs under an old stone bridge where quiet people meet in the early light. " * 2
_TURN = {"role": "user", "content": _TEXT}
_SAME = {"temperature": 0, "seed": 1}
BASES: dict[str, dict[str, Value]] = {
    "/v1/chat/completions": {"messages": [_TURN], "max_tokens": TOKENS, **_SAME},
    "/v1/completions": {"prompt": _TEXT, "max_tokens": TOKENS, **_SAME},
    "/v1/messages": {"messages": [_TURN], "max_tokens": TOKENS, "temperature": 0, "top_k": 1},
    "/v1/responses": {"input": _TEXT, "max_output_tokens": TOKENS, **_SAME},
}
"""By path: a request to which a field is added."""
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 4}}}
_FUNCTION = {"name": "look", "description": "d", "parameters": _SCHEMA}
_TOOLS = {
    "/v1/chat/completions": [{"type": "function", "function": _FUNCTION}],
    "/v1/messages": [{"name": "look", "description": "d", "input_schema": _SCHEMA}],
    "/v1/responses": [{"type": "function", "strict": False, **_FUNCTION}],
}
BESIDE: dict[str, dict[str, Value]] = {
    "top_logprobs": {"logprobs": True},
    "stream_options": {"stream": True},
    "stream_interval": {"stream": True},
    "min_tokens": {"stop": "e"},
    "include_stop_str_in_output": {"stop": "e"},
    "length_penalty": {"use_beam_search": True, "n": 2},
    "truncation_side": {"truncate_prompt_tokens": 16},
}
"""Fields without which another has no effect."""
_BY_NAME: dict[str, list[Value]] = {
    "temperature": [0, 0.5],
    "repetition_detection": [{"max_pattern_size": 4, "min_pattern_size": 1, "min_count": 2}],
    "structured_outputs": [{"regex": "[a-c]{5}"}, {"choice": ["yes", "no"]}, {"json": _SCHEMA}],
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
    ],
    "stop": ["e", ["e", "zq"]],
    "stop_sequences": [["e"], ["zq"]],
    "logit_bias": [{"40": 100}, {"9999": 1}],
    "bad_words": [["the"]],
    "allowed_token_ids": [[40, 41, 42], [99999]],
    "tool_choice": ["required", {"type": "any"}, {"type": "tool", "name": "look"},
                    {"type": "function", "function": {"name": "look"}},
                    {"type": "function", "function": {"name": "absent"}},
                    {"type": "function", "name": "look"}],
    "vllm_xargs": [{"note": 1}],
    "chat_template": ["{{ messages[0].content }}"],
    "chat_template_kwargs": [{"enable_thinking": False}],
}  # fmt: skip
"""Values that mean something, besides those of the type."""
_NUMBERS: list[Value] = [1, 3]
_FEW = 24
"""Values of a field at most, so that unions of fifty classes take no longer than the rest."""


@dataclass(frozen=True, slots=True)
class Case:
    """One request."""

    path: str
    field: str
    value: Value
    body: dict[str, Value]


def list_cases(path: str, model: str) -> Iterator[Case]:
    """The requests of a path: plain ones, and each field with each of its values, and streamed with
    the first of them."""
    base = {"model": model, **BASES[path]}
    for streams in ({}, {"stream": True}):
        yield Case(path, "", None, base | streams)
        for name, field in _find_class(path).model_fields.items():
            alias = field.alias or name
            beside = BESIDE.get(name, {})
            if name.startswith(("tool_choice", "parallel_tool")) and path in _TOOLS:
                beside = {"tools": _TOOLS[path]}
            values = _list_field(alias, field) if name != "stream" else [True, None, 1]
            for value in values[:1] if streams else values:
                yield Case(path, alias, value, base | streams | beside | {alias: value})


def _find_class(path: str) -> type[BaseModel]:
    # Here, as importing them takes half a minute.
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    kinds = ChatCompletionRequest, CompletionRequest, AnthropicMessagesRequest, ResponsesRequest
    return dict(zip(BASES, kinds, strict=True))[path]


def _list_field(name: str, field: FieldInfo) -> list[Value]:
    """Values of a field, one of a wrong type and null among them."""
    typed = list_values(field.annotation, tuple(field.metadata))
    found: list[Value] = []
    for value in (*[*_BY_NAME.get(name, ()), *typed][:_FEW], {"x": {"y": 1}}, None):
        if not any(type(value) is type(each) and value == each for each in found):
            found.append(value)
    return found


def list_values(kind: Any, bounds: tuple[Any, ...] = (), depth: int = 0) -> list[Value]:
    """Values of a type; `bounds`: what pydantic's annotations say of it."""
    kind = getattr(kind, "__value__", kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    inner = partial(list_values, depth=depth + 1)
    match origin:
        case typing.Annotated:
            return list_values(arguments[0], bounds + arguments[1:], depth)
        case typing.Union | types.UnionType:
            members = [inner(each) for each in arguments if each is not type(None)]
            return [value for values in members for value in values[: None if depth < 2 else 1]]
        case typing.Literal:
            return list(arguments)
        case _ if origin in (typing.Required, typing_extensions.Required):
            return inner(arguments[0])
        case _ if kind in (list, dict) or origin in (list, dict) or _is_iterable(origin):
            if kind is dict or origin is dict:
                return [{}, {"a": inner(arguments[1])[0] if arguments else "a"}]
            return [[], *([value] for value in (inner(arguments[0]) if arguments else ["a"]))]
    if kind is bool:
        return [True, False]
    if kind in (int, float):
        limits = [each for each in bounds if isinstance(each, annotated_types.Ge)]
        numbers = _NUMBERS if kind is int else [0.5, 1]
        return [*numbers, *(each.ge for each in limits if each.ge > -2)]
    if kind in (str, bytes):
        return ["a"]
    if isinstance(kind, type) and (hints := _list_members(kind)):
        return _build_objects(hints, depth)
    return ["a"]


def _is_iterable(origin: Any) -> bool:
    return isinstance(origin, type) and origin.__name__ in ("Iterable", "Sequence", "tuple")


def _list_members(kind: type) -> dict[str, tuple[Any, bool]]:
    """(type, whether it is required) of each member of a class, by its name in JSON."""
    if issubclass(kind, BaseModel):
        return {
            field.alias or name: (field.annotation, field.is_required())
            for name, field in kind.model_fields.items()
        }
    required: frozenset[str] = getattr(kind, "__required_keys__", frozenset())
    hints = typing_extensions.get_type_hints(kind) if hasattr(kind, "__annotations__") else {}
    return {
        name: (hint, name in required) for name, hint in hints.items() if not name.startswith("_")
    }


def _build_objects(members: dict[str, tuple[Any, bool]], depth: int) -> list[Value]:
    """An object with what is required, and one with all members."""
    if depth > 6:
        return [{}]
    values = {
        name: list_values(hint, depth=depth + 2) or ["a"] for name, (hint, _) in members.items()
    }
    least = {name: values[name][0] for name, (_, required) in members.items() if required}
    full = {name: each[-1] for name, each in values.items()}
    return [least] if least == full or depth > 4 else [least, full]
