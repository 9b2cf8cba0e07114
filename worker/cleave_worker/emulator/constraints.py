"""What is wrong with a chat's tools and with formats of answers, as vLLM 0.32 says it. Pure.

Used by `api_requests`. The emulated model calls no tools and follows no format, but clients must
learn from it what an engine would refuse.
"""

from collections.abc import Mapping
from typing import Any

_CHOICES = ("none", "auto", "required")
_FORMATS = ("text", "json_object", "json_schema")
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
"""Of structured outputs."""
Fault = tuple[str, str]
"""The message, and the parameter that it names."""


def find_fault(body: Mapping[str, Any], chat: bool) -> Fault | None:
    """The first fault; None: there is none."""
    fault = _find_format_fault(body)
    return fault or (_find_tool_fault(body) if chat else None)


def _find_format_fault(body: Mapping[str, Any]) -> Fault | None:
    response_format, outputs = body.get("response_format"), body.get("structured_outputs")
    if response_format is not None:
        kind = response_format.get("type")
        if kind not in _FORMATS:
            message = f"type must be one of {', '.join(_FORMATS)}, got {kind!r:.40}."
            return message, "response_format"
        schema = response_format.get("json_schema")
        if kind == "json_schema" and not isinstance(schema, dict):
            message = "When response_format type is 'json_schema', the 'json_schema' field must be"
            return f"{message} provided.", "response_format"
        if kind == "json_schema" and not isinstance(schema.get("name"), str):
            return "json_schema must have a name.", "response_format"
    if outputs is not None and sum(outputs.get(kind) is not None for kind in _KINDS) != 1:
        message = f"You must use one kind of structured outputs: {', '.join(_KINDS)}."
        return message, "structured_outputs"
    return None


def _find_tool_fault(body: Mapping[str, Any]) -> Fault | None:
    tools, choice = body.get("tools"), body.get("tool_choice")
    if tools == []:
        message = "`tools` must not be an empty array. Either provide at least one tool or omit the"
        return f"{message} field entirely.", "tools"
    names = [_get_name(tool) for tool in tools or ()]
    if None in names:
        return "Each of `tools` must have a function with a name.", "tools"
    if choice is None or choice == "none":
        return None
    if not tools:
        return "When using `tool_choice`, `tools` must be set.", "tool_choice"
    if isinstance(choice, str):
        if choice in _CHOICES:
            return None
        message = f"Invalid value for `tool_choice`: {choice:.40}! Only named tools, "
        return f'{message}"none", "auto" or "required" are supported.', "tool_choice"
    if _get_name(choice) in names:
        return None
    message = "The tool specified in `tool_choice` does not match any of the specified `tools`"
    return message, "tool_choice"


def _get_name(tool: object) -> str | None:
    """The name of a tool, or of the one that is chosen; None: it has none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None
