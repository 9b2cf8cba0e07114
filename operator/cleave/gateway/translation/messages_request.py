"""Translates requests of Anthropic's Messages API into chat completions. Pure.

Used by `translations`. The mapping follows vLLM 0.32 (`entrypoints/anthropic/serving.py`), so that
both translate a prompt alike. Two differences: a final assistant message
is continued, as in Anthropic's API, and a budget of thinking tokens becomes an effort, because
engines refuse budgets unless they are configured for them.
"""

import re

import msgspec

from cleave.gateway.http.completion_request import Fields
from cleave.gateway.http.errors import build_bad_request
from cleave.gateway.translation.messages_tools import MessagesToolSet
from cleave.gateway.translation.messages_turns import BLOCKS, TURNS, add_turn
from cleave.gateway.translation.request_fields import (
    EMPTY_TEXT,
    INTEGER,
    MAX_CONFIG_BYTES,
    TEXT,
    JoinedText,
    JsonText,
    ModelFacts,
    SystemText,
    build_unsupported,
    check_text,
    copy_engine_fields,
    decode_field,
    encode_raw,
    is_list,
    read_list,
    refuse_fields,
)
from cleave.time_slices import Steps

REFUSED = {
    "container": "nothing runs code here",
    "mcp_servers": "connect to MCP servers in the client and send their tools in tools",
    "thread": "send the whole conversation in messages",
}
_ATTRIBUTION = b'"x-anthropic-billing-header'
"""Beginning of a line with a hash of each request, which would make every prompt a new one."""
_ATTRIBUTION_LINE = re.compile(rb'"(?:[^"\\]|\\(?!n|u000[aA]).)*\\(?:n|u000[aA])')
_ATTRIBUTION_BYTES = 4_096
"""Longer lines are text."""
_MIN_THINKING_TOKENS = 1_024
_LOW_EFFORT_TOKENS = 4_096
_MEDIUM_EFFORT_TOKENS = 16_384
"""Budgets of thinking below these become efforts of low and medium; larger ones high."""
_TRUE, _FALSE = msgspec.Raw(b"true"), msgspec.Raw(b"false")


class MessagesToolChoice(msgspec.Struct, gc=False):
    """Which tools the model may or must call."""

    type: str
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, gc=False):
    """Whether the model thinks before it answers."""

    type: str
    budget_tokens: int = 0


class OutputFormat(msgspec.Struct, gc=False):
    """The schema of the answer."""

    schema: msgspec.Raw
    type: str = "json_schema"


class OutputConfig(msgspec.Struct, gc=False):
    """Effort and format of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


_OUTPUT_CONFIG = msgspec.json.Decoder(OutputConfig)
_THINKING: msgspec.json.Decoder[Thinking | None] = msgspec.json.Decoder(
    Thinking | None, strict=False
)
_MEMBERS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_TOOL_CHOICE: msgspec.json.Decoder[MessagesToolChoice | None] = msgspec.json.Decoder(
    MessagesToolChoice | None
)


def convert_messages_request(
    fields: Fields, system: SystemText, facts: ModelFacts
) -> Steps[Fields]:
    """The chat completion of a request to /v1/messages. Raises GatewayError (400)."""
    refuse_fields(fields, REFUSED)
    chat = copy_engine_fields(fields)
    chat |= yield from _convert_prompt(fields, system)
    if "max_tokens" not in fields:
        raise build_bad_request(
            "you must provide max_tokens: the limit of the answer", "max_tokens"
        )
    limit = decode_field(fields, "max_tokens", INTEGER, 0)
    if limit < 1:
        raise build_bad_request(f"max_tokens is {limit}: it must be at least 1", "max_tokens")
    chat["max_completion_tokens"] = encode_raw(limit)
    if "stop_sequences" in fields:
        chat["stop"] = fields["stop_sequences"]
    chat |= _convert_tool_choice(decode_field(fields, "tool_choice", _TOOL_CHOICE, None))
    output = _read_output_config(fields)
    effort = _choose_effort(fields, output, facts)
    if effort is not None:
        chat["reasoning_effort"] = encode_raw(effort)
    if output.format is not None:
        schema = {"name": "answer", "schema": output.format.schema}
        chat["response_format"] = encode_raw({"type": "json_schema", "json_schema": schema})
    return chat


def convert_count_request(fields: Fields, system: SystemText, facts: ModelFacts) -> Steps[Fields]:
    """The request to /tokenize for one to /v1/messages/count_tokens. Raises GatewayError (400)."""
    refuse_fields(fields, REFUSED)
    chat = yield from _convert_prompt(fields, system)
    for name in ("model", "chat_template_kwargs"):
        if name in fields:
            chat[name] = fields[name]
    effort = _choose_effort(fields, _read_output_config(fields), facts)
    if effort is not None:
        # What engines make of the effort of a chat; their /tokenize has no field for it.
        own = decode_field(fields, "chat_template_kwargs", _MEMBERS, {})
        options = {"enable_thinking": effort != "none"} | own | {"reasoning_effort": effort}
        chat["chat_template_kwargs"] = encode_raw(options)
    return chat


def _convert_prompt(fields: Fields, system: SystemText) -> Steps[Fields]:
    """`messages` and `tools`, and how the prompt ends."""
    if "messages" not in fields:
        raise build_bad_request("you must provide messages: the conversation", "messages")
    chat, tools = JsonText(b"["), MessagesToolSet()
    if "tools" in fields:
        yield from tools.add_all(fields["tools"])
    text = yield from _read_system(fields.get("system", EMPTY_TEXT), "system")
    yield from _add_system(chat, system, text)
    turns = yield from read_list(fields["messages"], "messages")
    if not turns:
        raise build_bad_request("messages is empty: send at least one", "messages")
    role = ""
    for number in range(len(turns)):
        path = f"messages[{number}]"
        turn = yield from TURNS.read(turns[number], path)
        if turn.role == "system":
            text = yield from _read_system(turn.content, f"{path}.content", tools)
            system.is_late = system.is_late or bool(role)
            yield from _add_system(chat, system, text)
        else:
            yield from add_turn(chat, turn, path)
            role = turn.role
        yield
    prompt = {"messages": (yield from system.prepend(chat.end_list()))}
    if role == "assistant":
        # The answer goes on where the client's beginning of it ends.
        prompt |= {"continue_final_message": _TRUE, "add_generation_prompt": _FALSE}
    functions = yield from tools.write()
    return prompt if functions is None else prompt | {"tools": functions}


def _add_system(chat: JsonText, system: SystemText, text: msgspec.Raw) -> Steps[None]:
    """Add a message of the system, unless it is empty."""
    if len(text) <= len(EMPTY_TEXT):
        return
    if system.is_merged:
        yield from system.text.add(text)
    else:
        yield from chat.add(b'{"role":"system","content":', text, b"},")


def _read_system(
    content: msgspec.Raw, path: str, tools: MessagesToolSet | None = None
) -> Steps[msgspec.Raw]:
    """The text of a message of the system. `tools`: those that its blocks may change."""
    if not is_list(content):
        return _drop_attribution(check_text(content, path))
    text = JoinedText()
    blocks = yield from read_list(content, path)
    for number in range(len(blocks)):
        place = f"{path}[{number}]"
        block = yield from BLOCKS.read(blocks[number], place)
        if tools is not None and block.type in ("tool_addition", "tool_removal"):
            is_added = block.type == "tool_addition"
            yield from tools.change(block.tool, f"{place}.tool", is_added=is_added)
        elif block.type == "text":
            yield from text.add(_drop_attribution(check_text(block.text, f"{place}.text")))
        else:
            raise build_unsupported(f"{place}.type", block.type, "text")
        yield
    return text.to_raw()


def _drop_attribution(text: msgspec.Raw) -> msgspec.Raw:
    """A text without the line in which Claude Code names itself."""
    begin = bytes(memoryview(text)[:_ATTRIBUTION_BYTES])
    if not begin.startswith(_ATTRIBUTION):
        return text
    line = _ATTRIBUTION_LINE.match(begin)
    if line is None:
        return EMPTY_TEXT if len(text) <= _ATTRIBUTION_BYTES else text
    return msgspec.Raw(b'"' + bytes(memoryview(text)[line.end() :]))


def _convert_tool_choice(choice: MessagesToolChoice | None) -> Fields:
    if choice is None:
        return {}
    chat = {"parallel_tool_calls": _FALSE} if choice.disable_parallel_tool_use else {}
    if choice.type == "tool":
        if not choice.name:
            raise build_bad_request("tool_choice.name must name the tool", "tool_choice.name")
        function = {"type": "function", "function": {"name": choice.name}}
        return chat | {"tool_choice": encode_raw(function)}
    names = {"auto": "auto", "any": "required", "none": "none"}
    if choice.type not in names:
        raise build_unsupported("tool_choice.type", choice.type, "auto, any, tool or none")
    return chat | {"tool_choice": encode_raw(names[choice.type])}


def _read_output_config(fields: Fields) -> OutputConfig:
    return decode_field(
        fields, "output_config", _OUTPUT_CONFIG, OutputConfig(), limit=MAX_CONFIG_BYTES
    )


def _choose_effort(fields: Fields, output: OutputConfig, facts: ModelFacts) -> str | None:
    """The effort that was requested or stands for a budget of thinking; None: the model's own."""
    thinking, effort = decode_field(fields, "thinking", _THINKING, None), output.effort
    if thinking is not None and thinking.type == "disabled":
        # Else the parser of reasoning would take the thought for the answer.
        is_always = facts.always_thinks(decode_field(fields, "model", TEXT, ""))
        return "low" if is_always else "none"
    if effort or thinking is None or thinking.type == "adaptive":
        return effort
    if thinking.type != "enabled":
        raise build_unsupported("thinking.type", thinking.type, "enabled, disabled or adaptive")
    if thinking.budget_tokens < _MIN_THINKING_TOKENS:
        fault = f"is {thinking.budget_tokens}: it must be at least {_MIN_THINKING_TOKENS}"
        raise build_bad_request(f"thinking.budget_tokens {fault}", "thinking.budget_tokens")
    if thinking.budget_tokens < _LOW_EFFORT_TOKENS:
        return "low"
    return "medium" if thinking.budget_tokens < _MEDIUM_EFFORT_TOKENS else "high"
