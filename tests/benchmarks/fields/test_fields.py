"""Values of types, and what counts as a difference between two answers."""

import json
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Literal, Required

import annotated_types
import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict


class Part(TypedDict, total=False):
    kind: Required[Literal["text"]]
    size: int


class Ask(BaseModel):
    name: str
    inner: "Part | None" = None
    plan: dict[str, int] | None = Field(default=None, alias="schema")


@pytest.fixture
def values(module: Callable[[str], ModuleType]) -> ModuleType:
    return module("request_values")


@pytest.fixture
def comparison(module: Callable[[str], ModuleType]) -> ModuleType:
    return module("comparison")


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (bool, [True, False]),
        (Literal["a", "b"], ["a", "b"]),
        (int | None, [1, 3]),
        (Annotated[int, annotated_types.Ge(0)] | None, [1, 3, 0]),
        (str | list[str], ["a", [], ["a"]]),
        (dict[str, int], [{}, {"a": 1}]),
        (Part, [{"kind": "text"}, {"kind": "text", "size": 3}]),
        # Of a union within an object each first value.
        (Ask, [{"name": "a"}, {"name": "a", "inner": {"kind": "text"}, "schema": {}}]),
    ],
)
def test_each_member_of_a_type_has_a_value(values: ModuleType, kind: object, expected) -> None:
    assert values.list_values(kind) == expected


def test_a_stream_is_compared_however_it_was_cut(comparison: ModuleType) -> None:
    choices = ({"index": index, "text": text} for index, text in ((0, "a"), (1, "b"), (0, "c")))
    events = [json.dumps({"id": "1", "choices": [choice]}) for choice in choices]
    stream = "".join(f"data: {event}\n\n" for event in events) + ": wait\n\ndata: [DONE]\n\n"
    added = comparison.add_events(stream)
    assert added["choices"] == [{"index": 0, "text": "ac"}, {"index": 1, "text": "b"}]
    assert added["kinds"] == ["event", "[DONE]"]


def test_what_differs_is_named_and_null_is_as_good_as_absent(comparison: ModuleType) -> None:
    one = {"a": [{"b": 1, "c": None}], "d": 2}
    other = {"a": [{"b": 3}], "e": 4}
    assert [*comparison.find_differences(one, other)] == ["a.b", "d", "e"]


def test_only_a_difference_that_a_rule_describes_has_a_reason(comparison: ModuleType) -> None:
    case = comparison.Case("/v1/messages", "stop", "a", {})
    rules = [{"path": "/v1/messages", "fields": "stop top_k", "what": "usage.*", "reason": "why"}]
    found = (comparison.Difference(case, "split", what) for what in ("usage.a", "text"))
    reasons = [comparison.find_reason(each, rules) for each in found]
    assert reasons == ["why", ""]
