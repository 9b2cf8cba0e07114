"""Translates tools of OpenAI's Responses API into functions of a chat. Pure.

Used by `responses_request`; `responses_answer` takes the names back. The mapping is vLLM's (0.32,
`tool_parsers/utils.py`), so that a model is shown the same: functions of a namespace have its name
before theirs, tools of free text are functions with one text, and tools that OpenAI's servers run
are left out. What is hard: a client names tools as it sent them, also where it forces or allows
some of them.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from cleave.gateway.http.errors import build_bad_request
from cleave.gateway.translation.request_fields import (
    EMPTY_TEXT,
    TEXT,
    JoinedText,
    JsonText,
    ObjectReader,
    Piece,
    build_unsupported,
    check_text,
    is_null,
    read_list,
    read_tool_name,
)
from cleave.time_slices import Steps

_NULL = msgspec.Raw(b"null")
_SEPARATOR = b"__"
_FREE_TEXT = msgspec.Raw(
    b'{"type":"object","properties":{"input":{"type":"string","description":"The freeform text '
    b'payload for this tool."}},"required":["input"],"additionalProperties":false}'
)
_FORCED_TOOLS = frozenset((
    "apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview", "custom",
    "file_search", "function", "image_generation", "local_shell", "mcp", "shell", "tool_search",
    "programmatic_tool_calling", "web_search", "web_search_preview",
    "web_search_preview_2025_03_11",
))  # fmt: skip
"""Kinds of tools that a client may choose."""
_GRAMMAR = msgspec.Raw(b'"\\n\\nThe text must match this grammar:\\n"')


class ResponsesTool(msgspec.Struct, gc=False):
    """A tool of any type."""

    type: str
    name: msgspec.Raw = EMPTY_TEXT
    description: msgspec.Raw = EMPTY_TEXT
    parameters: msgspec.Raw = _NULL
    strict: bool | None = None
    defer_loading: bool | None = None
    format: msgspec.Raw = _NULL
    """Of free text."""
    tools: msgspec.Raw = msgspec.Raw(b"[]")
    """Of a namespace."""


class TextGrammar(msgspec.Struct, gc=False):
    """The format of a tool's free text."""

    type: str = "text"
    definition: msgspec.Raw = EMPTY_TEXT


class ToolReference(msgspec.Struct, gc=False):
    """A tool that the model may call."""

    type: str = ""
    name: str = ""


class ResponsesToolChoice(msgspec.Struct, gc=False):
    """The tool that the model must call, or those that it may."""

    type: str
    name: str = ""
    mode: str = "auto"
    tools: Sequence[ToolReference] = ()


@dataclass(frozen=True, slots=True)
class ToolName:
    """The tool behind a function, as the client named it."""

    name: str
    namespace: str | None = None
    is_free_text: bool = False


ToolNames = Mapping[str, ToolName]
"""By the function's name."""

_TOOLS, _GRAMMARS = ObjectReader(ResponsesTool), ObjectReader(TextGrammar)
TOOL_CHOICE: msgspec.json.Decoder[str | ResponsesToolChoice | None] = msgspec.json.Decoder(
    str | ResponsesToolChoice | None
)


class ResponsesToolSet:
    """The functions of a chat; of two with the same name, the one that was added last."""

    def __init__(self) -> None:
        self.names: dict[str, ToolName] = {}
        self._functions: dict[str, list[Piece]] = {}

    def add_all(self, raw: msgspec.Raw, path: str) -> Steps[None]:
        """Add the tools of a list. Raises GatewayError (400)."""
        tools = yield from read_list(raw, path)
        for number in range(len(tools)):
            place = f"{path}[{number}]"
            tool = yield from _TOOLS.read(tools[number], place)
            if tool.type == "namespace":
                yield from self._add_namespace(tool, place)
            elif tool.type in ("function", "custom"):
                yield from self._add(tool, place)
            yield

    def write(
        self, choice: str | ResponsesToolChoice | None
    ) -> Steps[tuple[msgspec.Raw | None, object]]:
        """(the functions, None if there are none; which of them to call). Raises GatewayError
        (400)."""
        written, allowed = JsonText(b"["), self._list_allowed(choice)
        chosen: object = _read_mode(choice)
        if isinstance(choice, ResponsesToolChoice) and choice.type in ("function", "custom"):
            chosen = {"type": "function", "function": {"name": self._resolve(choice.name)}}
        for name, pieces in self._functions.items():
            if allowed is None or name in allowed:
                yield from written.add(*pieces, b",")
                yield
        functions = written.end_list() if len(written) > 1 else None
        if chosen == "required" and functions is None:
            message = "tool_choice is required, but tools has no function that the model can call"
            raise build_bad_request(message, "tool_choice")
        return functions, chosen

    def _add_namespace(self, tool: ResponsesTool, path: str) -> Steps[None]:
        inner = yield from read_list(tool.tools, f"{path}.tools")
        for number in range(len(inner)):
            place = f"{path}.tools[{number}]"
            function = yield from _TOOLS.read(inner[number], place)
            if function.type == "function":
                yield from self._add(function, place, tool.name, f"{path}.name")
            yield

    def _add(
        self,
        tool: ResponsesTool,
        path: str,
        namespace: msgspec.Raw = EMPTY_TEXT,
        namespace_path: str = "",
    ) -> Steps[None]:
        name = read_tool_name(tool.name, f"{path}.name", len(self.names))
        shown, prefix = tool.name, None
        if namespace_path:
            prefix = read_tool_name(namespace, namespace_path, 0)
            shown = join_names(namespace, tool.name)
        description, parameters = tool.description, tool.parameters
        is_free_text = tool.type == "custom"
        if is_free_text:
            description = yield from _describe_text(tool, path)
            parameters = _FREE_TEXT
        pieces: list[Piece] = [b'{"type":"function","function":{"name":', shown]
        pieces += [b',"parameters":', parameters]
        if check_text(description, f"{path}.description") != EMPTY_TEXT:
            pieces += [b',"description":', description]
        for key, flag in (b"strict", tool.strict), (b"defer_loading", tool.defer_loading):
            if flag is not None:
                pieces.append(b',"%b":%b' % (key, b"true" if flag else b"false"))
        flat = TEXT.decode(shown)
        self._functions[flat] = [*pieces, b"}}"]
        self.names[flat] = ToolName(name, prefix, is_free_text)

    def _list_allowed(self, choice: str | ResponsesToolChoice | None) -> Collection[str] | None:
        if not isinstance(choice, ResponsesToolChoice) or choice.type != "allowed_tools":
            return None
        allowed = {reference.name for reference in choice.tools}
        return {
            flat
            for flat, tool in self.names.items()
            if not allowed.isdisjoint((flat, tool.name, tool.namespace))
        }

    def _resolve(self, name: str) -> str:
        """The function that a client means. Raises GatewayError (400)."""
        if name in self.names:
            return name
        found = [flat for flat, tool in self.names.items() if tool.name == name]
        if len(found) == 1:
            return found[0]
        reason = "is in several namespaces: add one's name" if found else "is not one of tools"
        raise build_bad_request(f"tool_choice.name {name[:80]!r} {reason}", "tool_choice.name")


def join_names(namespace: msgspec.Raw, name: msgspec.Raw) -> msgspec.Raw:
    """The name of a namespace's function, as JSON."""
    return msgspec.Raw(bytes(namespace)[:-1] + _SEPARATOR + bytes(name)[1:])


def _describe_text(tool: ResponsesTool, path: str) -> Steps[msgspec.Raw]:
    """The description of a tool of free text, and of its grammar: engines do not enforce it."""
    description = check_text(tool.description, f"{path}.description")
    if is_null(tool.format):
        return description
    place = f"{path}.format"
    grammar = yield from _GRAMMARS.read(tool.format, place)
    definition = check_text(grammar.definition, f"{place}.definition")
    if definition == EMPTY_TEXT:
        return description
    joined = JoinedText()
    for text in (description, _GRAMMAR, definition):
        yield from joined.add(text)
    return joined.to_raw()


def _read_mode(choice: str | ResponsesToolChoice | None) -> str | None:
    """Whether functions may or must be called; None: the client does not say. Tools that OpenAI's
    servers run cannot be forced."""
    if isinstance(choice, ResponsesToolChoice):
        choice = choice.mode if choice.type == "allowed_tools" else choice.type
        choice = "auto" if choice in _FORCED_TOOLS else choice
    if choice not in (None, "auto", "none", "required"):
        raise build_unsupported("tool_choice", choice, "auto, none, required or a function")
    return choice
