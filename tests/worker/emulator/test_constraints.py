"""What is wrong with tools and formats, as vLLM judges it."""

from typing import Any

import pytest

from cleave_worker.emulator.constraints import find_fault

LOOK: dict[str, Any] = {"type": "function", "function": {"name": "look"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"tools": [LOOK]},
        {"tools": [LOOK], "tool_choice": "required"},
        {"tools": [LOOK], "tool_choice": LOOK},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"response_format": SCHEMA},
        {"structured_outputs": {"regex": "a"}},
    ],
)
def test_what_an_engine_takes_has_no_fault(body: dict[str, Any]) -> None:
    assert find_fault(body, chat=True) is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": "often"}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {}}, "tool_choice"),
        ({"tools": [LOOK], "tool_choice": {"function": {"name": "absent"}}}, "tool_choice"),
        ({"response_format": {}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ],
)
def test_what_an_engine_refuses_is_a_fault_of_its_parameter(
    body: dict[str, Any], param: str
) -> None:
    fault = find_fault(body, chat=True)
    assert fault is not None
    assert fault[1] == param
