"""Translates tools of Anthropic's Messages API into functions of a chat. Pure.

Used by `messages_request`. Tools may be deferred: a template that knows of it leaves them out of
the prompt until the conversation refers to them. System messages may add and remove tools; a chat
has one list, so it gets those that are there at the end, as in vLLM 0.32.
"""

import msgspec

from cleave.gateway.http.errors import build_bad_request
from cleave.gateway.translation.request_fields import (
    EMPTY_TEXT,
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

_ANY_OBJECT = msgspec.Raw(b'{"type":"object"}')


class MessagesTool(msgspec.Struct, gc=False):
    """A tool that the client runs."""

    name: msgspec.Raw
    type: str | None = None
    description: msgspec.Raw = EMPTY_TEXT
    input_schema: msgspec.Raw = msgspec.Raw(b"null")
    strict: bool | None = None
    defer_loading: bool | None = None


class ToolChange(msgspec.Struct, gc=False):
    """A tool that is added or removed: its name, or its definition."""

    type: str
    name: msgspec.Raw = EMPTY_TEXT
    definition: msgspec.Raw = msgspec.Raw(b"null")


_TOOLS, _CHANGES = ObjectReader(MessagesTool), ObjectReader(ToolChange)


class MessagesToolSet:
    """The tools of a conversation, by name; of two with the same, the one that came last."""

    def __init__(self) -> None:
        self._tools: dict[str, MessagesTool] = {}
        self._removed: set[str] = set()

    def add_all(self, raw: msgspec.Raw) -> Steps[None]:
        """Add the tools of a request. Raises GatewayError (400)."""
        tools = yield from read_list(raw, "tools")
        for number in range(len(tools)):
            yield from self._add(tools[number], f"tools[{number}]")
            yield

    def change(self, raw: msgspec.Raw, path: str, *, is_added: bool) -> Steps[None]:
        """Add or remove a tool. Raises GatewayError (400)."""
        change = yield from _CHANGES.read(raw, path)
        if change.type == "tool_definition" and is_added:
            name = yield from self._add(change.definition, f"{path}.definition")
        elif change.type == "tool_reference":
            name = read_tool_name(change.name, f"{path}.name", 0)
            if name not in self._tools:
                message = f"{path}.name {name[:80]!r} is not one of tools"
                raise build_bad_request(message, f"{path}.name")
        else:
            raise build_unsupported(f"{path}.type", change.type, "tool_reference")
        if is_added:
            self._removed.discard(name)
            self._tools[name].defer_loading = None
        else:
            self._removed.add(name)

    def write(self) -> Steps[msgspec.Raw | None]:
        """The functions; None: there are none."""
        written = JsonText(b"[")
        for name, tool in self._tools.items():
            if name not in self._removed:
                yield from written.add(*_build_function(tool), b",")
                yield
        return written.end_list() if len(written) > 1 else None

    def _add(self, raw: msgspec.Raw, path: str) -> Steps[str]:
        tool = yield from _TOOLS.read(raw, path)
        is_own = tool.type in (None, "custom")
        if not is_own and is_null(tool.input_schema):
            allowed = "a tool with a name and an input_schema, which the client runs"
            raise build_unsupported(f"{path}.type", tool.type or "", allowed)
        check_text(tool.description, f"{path}.description")
        name = read_tool_name(tool.name, f"{path}.name", len(self._tools))
        self._tools[name] = tool
        return name


def _build_function(tool: MessagesTool) -> list[Piece]:
    schema = tool.input_schema if not is_null(tool.input_schema) else _ANY_OBJECT
    pieces: list[Piece] = [b'{"type":"function","function":{"name":', tool.name]
    pieces += [b',"parameters":', schema]
    description = check_text(tool.description, "")
    if description != EMPTY_TEXT:
        pieces += [b',"description":', description]
    for key, flag in (b"strict", tool.strict), (b"defer_loading", tool.defer_loading):
        if flag is not None:
            pieces.append(b',"%b":%b' % (key, b"true" if flag else b"false"))
    return [*pieces, b"}}"]
