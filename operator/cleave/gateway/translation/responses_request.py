"""Translates requests of OpenAI's Responses API into chat completions. Pure.

Used by `translations`. Nothing is stored: every request carries its whole conversation, and
references to earlier responses are refused. What is hard: a turn of the model consists of several
items here (reasoning, a message, calls of functions) and of one message in a chat, so consecutive
items of the model are joined.
"""

import msgspec

from cleave.gateway.http.completion_request import Fields
from cleave.gateway.http.errors import build_bad_request
from cleave.gateway.translation.request_fields import (
    EMPTY_TEXT,
    FLAG,
    MAX_CONFIG_BYTES,
    TEXT,
    TEXTS,
    JoinedText,
    JsonText,
    ObjectReader,
    Piece,
    SystemText,
    build_unsupported,
    check_text,
    copy_engine_fields,
    decode_field,
    encode_raw,
    is_list,
    is_text,
    read_list,
    refuse_fields,
)
from cleave.gateway.translation.responses_tools import (
    TOOL_CHOICE,
    ResponsesToolSet,
    ToolNames,
    join_names,
)
from cleave.time_slices import Steps

REFUSED = {
    "conversation": "nothing is stored here, so send the whole conversation in input",
    "previous_input_messages": "send the whole conversation in input",
    "previous_response_id": "nothing is stored here, so send the whole conversation in input",
    "prompt": "nothing is stored here, so send the prompt's text in instructions and input",
}
_LOGPROBS = "message.output_text.logprobs"
_HOSTED_ITEMS = frozenset((
    "code_interpreter_call", "configuration_update", "file_search_call", "image_generation_call",
    "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools",
    "tool_search_call", "web_search_call",
))  # fmt: skip
"""What OpenAI's servers or a client did meanwhile; messages after it have the results."""
_DETAILS = ("auto", "high", "low")


class Part(msgspec.Struct, gc=False):
    """A part of a message's content, of any type."""

    type: str
    text: msgspec.Raw = EMPTY_TEXT
    refusal: msgspec.Raw = EMPTY_TEXT
    image_url: msgspec.Raw = EMPTY_TEXT
    detail: str | None = None


class Item(msgspec.Struct, gc=False):
    """An item of the input, of any type."""

    type: str = "message"
    role: str = ""
    content: msgspec.Raw = EMPTY_TEXT
    call_id: msgspec.Raw = EMPTY_TEXT
    name: msgspec.Raw = EMPTY_TEXT
    arguments: msgspec.Raw = EMPTY_TEXT
    namespace: msgspec.Raw = EMPTY_TEXT
    input: msgspec.Raw = EMPTY_TEXT
    output: msgspec.Raw = EMPTY_TEXT
    summary: msgspec.Raw = EMPTY_TEXT
    tools: msgspec.Raw = msgspec.Raw(b"[]")
    status: str | None = None


class Reasoning(msgspec.Struct, gc=False):
    """Whether and how much the model thinks before it answers."""

    effort: str | None = None


class TextFormat(msgspec.Struct, gc=False):
    """The format of the answer."""

    type: str
    name: str = "answer"
    schema: msgspec.Raw = msgspec.Raw(b"{}")
    strict: bool | None = None


class TextConfig(msgspec.Struct, gc=False):
    """How the answer is written."""

    format: TextFormat | None = None


_ITEMS, _PARTS = ObjectReader(Item), ObjectReader(Part)
_TRUE, _FALSE = msgspec.Raw(b"true"), msgspec.Raw(b"false")
_LIMIT: msgspec.json.Decoder[int | None] = msgspec.json.Decoder(int | None)
_REASONING = msgspec.json.Decoder(Reasoning)
_TEXT_CONFIG = msgspec.json.Decoder(TextConfig)


def convert_responses_request(
    fields: Fields, system: SystemText
) -> Steps[tuple[Fields, ToolNames]]:
    """(the chat completion of a request to /v1/responses, the tools behind its functions). Raises
    GatewayError (400)."""
    refuse_fields(fields, REFUSED)
    chat, tools = copy_engine_fields(fields) | _convert_values(fields), ResponsesToolSet()
    if "tools" in fields:
        yield from tools.add_all(fields["tools"], "tools")
    chat |= yield from _convert_input(fields, tools, system)
    choice = decode_field(fields, "tool_choice", TOOL_CHOICE, None, limit=MAX_CONFIG_BYTES)
    functions, chosen = yield from tools.write(choice)
    if functions is not None:
        chat["tools"] = functions
        if "parallel_tool_calls" in fields:
            chat["parallel_tool_calls"] = fields["parallel_tool_calls"]
        if chosen is not None:
            chat["tool_choice"] = encode_raw(chosen)
    config = decode_field(fields, "text", _TEXT_CONFIG, TextConfig(), limit=MAX_CONFIG_BYTES)
    output_format = _convert_format(config)
    if output_format is not None:
        chat["response_format"] = encode_raw(output_format)
    return chat, tools.names


def _convert_values(fields: Fields) -> Fields:
    """Short values; those are refused that an answer would silently not honour."""
    if decode_field(fields, "background", FLAG, False):
        raise build_unsupported("background", "true", "a stream, or false")
    includes: list[str] = decode_field(fields, "include", TEXTS, [])
    if _LOGPROBS in includes:
        raise build_unsupported("include", _LOGPROBS, "/v1/chat/completions with logprobs")
    chat: Fields = {name: fields[name] for name in ("service_tier", "user") if name in fields}
    if decode_field(fields, "truncation", TEXT, "disabled") == "auto":
        chat["truncate_prompt_tokens"] = msgspec.Raw(b"-1")
    limit = decode_field(fields, "max_output_tokens", _LIMIT, None)
    if limit is not None:
        if limit < 1:
            message = f"max_output_tokens is {limit}: it must be at least 1"
            raise build_bad_request(message, "max_output_tokens")
        chat["max_completion_tokens"] = encode_raw(limit)
    reasoning = decode_field(fields, "reasoning", _REASONING, Reasoning())
    if reasoning.effort is not None:
        chat["reasoning_effort"] = encode_raw(reasoning.effort)
    return chat


class _Conversation:
    """Writes the messages of a chat. Items of the model are collected until its turn ends."""

    def __init__(self, tools: ResponsesToolSet, system: SystemText) -> None:
        self.tools = tools
        self.system = system
        self.messages = JsonText(b"[")
        self.role = ""
        """Of the open message; empty: there is none."""
        self.reasoning = JoinedText()
        self.text = JoinedText()
        self.calls = JsonText(b"[")

    def begin(self, role: str) -> Steps[None]:
        """End the open message and begin one of this role."""
        yield from self.end()
        self.role = role
        self.text = JoinedText(b"" if role == "assistant" else b"\\n\\n")

    def begin_model_turn(self, *, thinks: bool = False) -> Steps[None]:
        """Go on with the model's turn at the end of the conversation, or begin one. A model thinks
        before it writes, so that reasoning (`thinks`) after text belongs to another turn."""
        has_written = self.text.count or len(self.calls) > 1
        if self.role != "assistant" or (thinks and has_written):
            yield from self.begin("assistant")

    def end(self) -> Steps[None]:
        """Write the open message."""
        messages, role = self.messages, self.role
        if role:
            yield from messages.add(b'{"role":"%b"' % role.encode())
            if self.reasoning.count:
                yield from messages.add(b',"reasoning":', self.reasoning.to_raw())
            if self.text.count:
                yield from messages.add(b',"content":', self.text.to_raw())
            if len(self.calls) > 1:
                yield from messages.add(b',"tool_calls":', self.calls.end_list())
            yield from messages.add(b"},")
        self.role, self.reasoning = "", JoinedText()
        self.text, self.calls = JoinedText(), JsonText(b"[")


def _convert_input(fields: Fields, tools: ResponsesToolSet, system: SystemText) -> Steps[Fields]:
    if "input" not in fields:
        raise build_bad_request("you must provide input: a text or a list of items", "input")
    given, chat, ending = fields["input"], _Conversation(tools, system), Fields()
    instructions = check_text(fields.get("instructions", EMPTY_TEXT), "instructions")
    if instructions != EMPTY_TEXT:
        yield from _add_system(chat, instructions)
    if is_text(given):
        yield from _add_user_message(chat, given, "input")
    else:
        items = yield from read_list(given, "input")
        if not items:
            raise build_bad_request("input is empty: send at least one item", "input")
        for number in range(len(items)):
            path = f"input[{number}]"
            item = yield from _ITEMS.read(items[number], path)
            yield from _add_item(chat, item, path)
            yield
        if item.role == "assistant" and item.status in ("in_progress", "incomplete"):
            # The answer goes on where the message was cut short, as vLLM does.
            ending = {"continue_final_message": _TRUE, "add_generation_prompt": _FALSE}
    yield from chat.end()
    messages = yield from system.prepend(chat.messages.end_list())
    return ending | {"messages": messages}


def _add_item(chat: _Conversation, item: Item, path: str) -> Steps[None]:
    """Add an item's message, or extend the open one."""
    if item.type == "message":
        yield from _add_message(chat, item, path)
    elif item.type in ("function_call", "custom_tool_call"):
        yield from _add_call(chat, item, path)
    elif item.type in ("function_call_output", "custom_tool_call_output"):
        yield from chat.end()
        call_id = check_text(item.call_id, f"{path}.call_id")
        yield from chat.messages.add(b'{"role":"tool","tool_call_id":', call_id, b',"content":')
        output, place = item.output, f"{path}.output"
        if is_list(output):
            output = yield from _read_parts(output, place, joins_texts=True)
        else:
            output = check_text(output, place)
        yield from chat.messages.add(output, b"},")
    elif item.type == "reasoning":
        is_whole = is_list(item.content) and len(item.content) > len(b"[]")
        yield from chat.begin_model_turn(thinks=True)
        thoughts = item.content if is_whole else item.summary
        place = f"{path}.content" if is_whole else f"{path}.summary"
        thought = EMPTY_TEXT
        if is_list(thoughts):
            thought = yield from _read_text(thoughts, place, any_type=True)
        yield from chat.reasoning.add(thought)
    elif item.type in ("additional_tools", "tool_search_output"):
        yield from chat.tools.add_all(item.tools, f"{path}.tools")
    elif item.type not in _HOSTED_ITEMS:
        allowed = "messages, calls of functions and custom tools, their outputs, or reasoning"
        raise build_unsupported(f"{path}.type", item.type, allowed)


def _add_call(chat: _Conversation, item: Item, path: str) -> Steps[None]:
    yield from chat.begin_model_turn()
    name = check_text(item.name, f"{path}.name")
    if check_text(item.namespace, f"{path}.namespace") != EMPTY_TEXT:
        name = join_names(item.namespace, name)
    yield from chat.calls.add(b'{"id":', check_text(item.call_id, f"{path}.call_id"))
    yield from chat.calls.add(b',"type":"function","function":{"name":', name)
    if item.type == "function_call":
        arguments = check_text(item.arguments, f"{path}.arguments")
        yield from chat.calls.add(b',"arguments":', arguments, b"}},")
    else:
        given = JsonText(b'{"input": ')
        yield from given.add(check_text(item.input, f"{path}.input"))
        yield from chat.calls.add_quoted(b',"arguments":', given.to_raw(b"}"), b"}},")


def _add_message(chat: _Conversation, item: Item, path: str) -> Steps[None]:
    if item.role == "user":
        yield from _add_user_message(chat, item.content, f"{path}.content")
        return
    if item.role not in ("assistant", "system", "developer"):
        allowed = "user, assistant, system or developer"
        raise build_unsupported(f"{path}.role", item.role, allowed)
    text = yield from _read_text(item.content, f"{path}.content")
    if item.role == "assistant":
        yield from chat.begin_model_turn()
        yield from chat.text.add(text)
    else:
        yield from _add_system(chat, text)


def _add_system(chat: _Conversation, text: msgspec.Raw) -> Steps[None]:
    if chat.system.is_merged:
        yield from chat.system.text.add(text)
        return
    if chat.role != "system":
        # Chat templates of many models accept one system message only.
        chat.system.is_late = chat.system.is_late or bool(chat.role) or len(chat.messages) > 1
        yield from chat.begin("system")
    yield from chat.text.add(text)


def _read_text(raw: msgspec.Raw, path: str, *, any_type: bool = False) -> Steps[msgspec.Raw]:
    """A text, or the texts of parts."""
    if not is_list(raw):
        return check_text(raw, path)
    joined = JoinedText()
    parts = yield from read_list(raw, path)
    for number in range(len(parts)):
        place = f"{path}[{number}]"
        part = yield from _PARTS.read(parts[number], place)
        if not any_type and part.type not in ("input_text", "output_text", "text", "refusal"):
            raise build_unsupported(f"{place}.type", part.type, "text")
        text = check_text(part.text, f"{place}.text")
        if text == EMPTY_TEXT:
            text = check_text(part.refusal, f"{place}.refusal")
        yield from joined.add(text)
        yield
    return joined.to_raw()


def _add_user_message(chat: _Conversation, content: msgspec.Raw, path: str) -> Steps[None]:
    """A user's content: its text, or parts with pictures."""
    yield from chat.end()
    text = (yield from _read_parts(content, path)) if is_list(content) else content
    text = text if is_list(text) else check_text(text, path)
    yield from chat.messages.add(b'{"role":"user","content":', text, b"},")


def _read_parts(
    content: msgspec.Raw, path: str, *, joins_texts: bool = False
) -> Steps[msgspec.Raw]:
    """Parts of a chat's message; of a single text, the text, or if `joins_texts`, of several."""
    written, joined = JsonText(b"["), JoinedText()
    parts = yield from read_list(content, path)
    for number in range(len(parts)):
        place = f"{path}[{number}]"
        part = yield from _PARTS.read(parts[number], place)
        pieces, text = _convert_part(part, place)
        if text is not None:
            yield from joined.add(text)
        yield from written.add(*pieces, b",")
        yield
    if joined.count == len(parts) and (joins_texts or len(parts) == 1):
        return joined.to_raw()
    return written.end_list()


def _convert_part(part: Part, path: str) -> tuple[list[Piece], msgspec.Raw | None]:
    """(a part of a message, its text); the text is None of an image."""
    if part.type in ("input_text", "output_text", "text"):
        text = check_text(part.text, f"{path}.text")
        return [b'{"type":"text","text":', text, b"}"], text
    if part.type != "input_image":
        raise build_unsupported(f"{path}.type", part.type, "input_text or input_image")
    url = check_text(part.image_url, f"{path}.image_url")
    if url == EMPTY_TEXT:
        message = "nothing is stored here, so send the picture as a URL or a data URL"
        raise build_bad_request(f"{path}.image_url is missing: {message}", f"{path}.image_url")
    detail = part.detail if part.detail in _DETAILS else None
    after = b',"detail":"%b"}}' % detail.encode() if detail is not None else b"}}"
    return [b'{"type":"image_url","image_url":{"url":', url, after], None


def _convert_format(config: TextConfig) -> object:
    chosen = config.format
    if chosen is None or chosen.type == "text":
        return None
    if chosen.type == "json_object":
        return {"type": "json_object"}
    if chosen.type != "json_schema":
        allowed = "text, json_object or json_schema"
        raise build_unsupported("text.format.type", chosen.type, allowed)
    schema: dict[str, object] = {"name": chosen.name, "schema": chosen.schema}
    if chosen.strict is not None:
        schema["strict"] = chosen.strict
    return {"type": "json_schema", "json_schema": schema}
