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
    INTEGER,
    MAX_CONFIG_BYTES,
    TEXT,
    TEXTS,
    JoinedText,
    JsonText,
    ObjectReader,
    Piece,
    build_unsupported,
    check_names,
    check_text,
    copy_engine_fields,
    decode_field,
    encode_raw,
    is_list,
    is_text,
    read_list,
)
from cleave.time_slices import Steps

_TRANSLATED = frozenset((
    "input", "instructions", "max_output_tokens", "metadata", "model", "parallel_tool_calls",
    "reasoning", "service_tier", "stream", "text", "tool_choice", "tools", "user",
))  # fmt: skip
_IGNORED = frozenset((
    "access_programs", "background", "include", "max_tool_calls", "moderation", "prompt_cache_key",
    "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "store",
    "stream_options", "top_logprobs", "truncation",
))  # fmt: skip
"""About OpenAI's service and its own tools; some of their values are refused below."""
KNOWN = _TRANSLATED | _IGNORED
REFUSED = {
    "context_management": "shorten input in the client",
    "conversation": "nothing is stored here, so send the whole conversation in input",
    "image": "models here answer with text",
    "previous_response_id": "nothing is stored here, so send the whole conversation in input",
    "prompt": "nothing is stored here, so send the prompt's text in instructions and input",
}
_IGNORED_INCLUDES = ("reasoning.encrypted_content",)


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
    output: msgspec.Raw = EMPTY_TEXT
    summary: msgspec.Raw = EMPTY_TEXT


class ResponsesTool(msgspec.Struct, gc=False):
    """A tool that the client runs."""

    type: str
    name: msgspec.Raw = EMPTY_TEXT
    description: msgspec.Raw = EMPTY_TEXT
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    strict: bool | None = None


class ResponsesToolChoice(msgspec.Struct, gc=False):
    """The function that the model must call."""

    type: str
    name: str = ""


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


_ITEMS, _PARTS, _TOOLS = ObjectReader(Item), ObjectReader(Part), ObjectReader(ResponsesTool)
_LIMIT: msgspec.json.Decoder[int | None] = msgspec.json.Decoder(int | None)
_REASONING = msgspec.json.Decoder(Reasoning)
_TEXT_CONFIG = msgspec.json.Decoder(TextConfig)
_TOOL_CHOICE: msgspec.json.Decoder[str | ResponsesToolChoice | None] = msgspec.json.Decoder(
    str | ResponsesToolChoice | None
)


def convert_responses_request(fields: Fields) -> Steps[Fields]:
    """The chat completion of a request to /v1/responses. Raises GatewayError (400)."""
    check_names(fields, KNOWN, REFUSED)
    _refuse_values(fields)
    chat = copy_engine_fields(fields)
    for name in ("service_tier", "user"):
        if name in fields:
            chat[name] = fields[name]
    chat["messages"] = yield from _convert_input(fields)
    limit = decode_field(fields, "max_output_tokens", _LIMIT, None)
    if limit is not None:
        if limit < 1:
            message = f"max_output_tokens is {limit}: it must be at least 1"
            raise build_bad_request(message, "max_output_tokens")
        chat["max_completion_tokens"] = encode_raw(limit)
    tools = (yield from _convert_tools(fields["tools"])) if "tools" in fields else None
    choice = _convert_tool_choice(decode_field(fields, "tool_choice", _TOOL_CHOICE, None))
    if tools is not None:
        chat["tools"] = tools
        if "parallel_tool_calls" in fields:
            chat["parallel_tool_calls"] = fields["parallel_tool_calls"]
        if choice is not None:
            chat["tool_choice"] = encode_raw(choice)
    reasoning = decode_field(fields, "reasoning", _REASONING, Reasoning())
    if reasoning.effort is not None:
        chat["reasoning_effort"] = encode_raw(reasoning.effort)
    config = decode_field(fields, "text", _TEXT_CONFIG, TextConfig(), limit=MAX_CONFIG_BYTES)
    output_format = _convert_format(config)
    if output_format is not None:
        chat["response_format"] = encode_raw(output_format)
    return chat


def _refuse_values(fields: Fields) -> None:
    """Refuse values that an answer would silently not honour."""
    if decode_field(fields, "background", FLAG, False):
        raise build_unsupported("background", "true", "a stream, or false")
    if decode_field(fields, "top_logprobs", INTEGER, 0):
        raise build_unsupported("top_logprobs", "above 0", "/v1/chat/completions, or 0")
    truncation = decode_field(fields, "truncation", TEXT, "disabled")
    if truncation != "disabled":
        raise build_unsupported("truncation", truncation, "disabled, and shorten input yourself")
    includes: list[str] = decode_field(fields, "include", TEXTS, [])
    for at, name in enumerate(includes):
        if name not in _IGNORED_INCLUDES:
            raise build_unsupported(f"include[{at}]", name, " or ".join(_IGNORED_INCLUDES))


class _Conversation:
    """Writes the messages of a chat. Items of the model are collected until its turn ends."""

    def __init__(self) -> None:
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


def _convert_input(fields: Fields) -> Steps[msgspec.Raw]:
    if "input" not in fields:
        raise build_bad_request("you must provide input: a text or a list of items", "input")
    given, chat = fields["input"], _Conversation()
    instructions = check_text(fields.get("instructions", EMPTY_TEXT), "instructions")
    if instructions != EMPTY_TEXT:
        yield from chat.begin("system")
        yield from chat.text.add(instructions)
    if is_text(given):
        yield from _add_user_message(chat, given, "input")
    else:
        items = yield from read_list(given, "input")
        if not items:
            raise build_bad_request("input is empty: send at least one item", "input")
        for number in range(len(items)):
            path = f"input[{number}]"
            item = _ITEMS.read(items[number], path) or (
                yield from _ITEMS.read_long(items[number], path)
            )
            yield from _add_item(chat, item, path)
            yield
    yield from chat.end()
    return chat.messages.end_list()


def _add_item(chat: _Conversation, item: Item, path: str) -> Steps[None]:
    """Add an item's message, or extend the open one."""
    if item.type == "message":
        yield from _add_message(chat, item, path)
    elif item.type == "function_call":
        yield from chat.begin_model_turn()
        yield from chat.calls.add(b'{"id":', check_text(item.call_id, f"{path}.call_id"))
        name = check_text(item.name, f"{path}.name")
        yield from chat.calls.add(b',"type":"function","function":{"name":', name)
        arguments = check_text(item.arguments, f"{path}.arguments")
        yield from chat.calls.add(b',"arguments":', arguments, b"}},")
    elif item.type == "function_call_output":
        yield from chat.end()
        text = yield from _read_text(item.output, f"{path}.output")
        call_id = check_text(item.call_id, f"{path}.call_id")
        yield from chat.messages.add(b'{"role":"tool","tool_call_id":', call_id)
        yield from chat.messages.add(b',"content":', text, b"},")
    elif item.type == "reasoning":
        is_whole = is_list(item.content) and len(item.content) > len(b"[]")
        yield from chat.begin_model_turn(thinks=True)
        thoughts = item.content if is_whole else item.summary
        place = f"{path}.content" if is_whole else f"{path}.summary"
        thought = EMPTY_TEXT
        if is_list(thoughts):
            thought = yield from _read_text(thoughts, place, any_type=True)
        yield from chat.reasoning.add(thought)
    else:
        allowed = "message, function_call, function_call_output or reasoning"
        raise build_unsupported(f"{path}.type", item.type, allowed)


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
    elif chat.role != "system":
        # Chat templates of many models accept one system message only.
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
        part = _PARTS.read(parts[number], place) or (
            yield from _PARTS.read_long(parts[number], place)
        )
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
    messages, written = chat.messages, JsonText(b"[")
    if not is_list(content):
        text = check_text(content, path)
        yield from messages.add(b'{"role":"user","content":', text, b"},")
        return
    parts = yield from read_list(content, path)
    for number in range(len(parts)):
        place = f"{path}[{number}]"
        part = _PARTS.read(parts[number], place) or (
            yield from _PARTS.read_long(parts[number], place)
        )
        pieces, only_text = _convert_part(part, place)
        if len(parts) == 1 and only_text is not None:
            yield from messages.add(b'{"role":"user","content":', only_text, b"},")
            return
        yield from written.add(*pieces, b",")
        yield
    yield from messages.add(b'{"role":"user","content":', written.end_list(), b"},")


def _convert_part(part: Part, path: str) -> tuple[list[Piece], msgspec.Raw | None]:
    """(a part of a message, its text); the text is None of an image."""
    if part.type in ("input_text", "text"):
        text = check_text(part.text, f"{path}.text")
        return [b'{"type":"text","text":', text, b"}"], text
    if part.type != "input_image":
        raise build_unsupported(f"{path}.type", part.type, "input_text or input_image")
    url = check_text(part.image_url, f"{path}.image_url")
    if url == EMPTY_TEXT:
        message = "nothing is stored here, so send the picture as a URL or a data URL"
        raise build_bad_request(f"{path}.image_url is missing: {message}", f"{path}.image_url")
    after = b',"detail":%b}}' % bytes(encode_raw(part.detail)) if part.detail else b"}}"
    return [b'{"type":"image_url","image_url":{"url":', url, after], None


def _convert_tools(raw: msgspec.Raw) -> Steps[msgspec.Raw | None]:
    """The functions; None: there are none."""
    functions = JsonText(b"[")
    tools = yield from read_list(raw, "tools")
    for number in range(len(tools)):
        path = f"tools[{number}]"
        tool = _TOOLS.read(tools[number], path) or (
            yield from _TOOLS.read_long(tools[number], path)
        )
        if tool.type != "function":
            raise build_unsupported(f"{path}.type", tool.type, "function, which the client runs")
        name = check_text(tool.name, f"{path}.name")
        if name == EMPTY_TEXT:
            raise build_bad_request(f"{path}.name must name the function", f"{path}.name")
        yield from functions.add(b'{"type":"function","function":{"name":', name)
        yield from functions.add(b',"parameters":', tool.parameters)
        description = check_text(tool.description, f"{path}.description")
        if description != EMPTY_TEXT:
            yield from functions.add(b',"description":', description)
        if tool.strict is not None:
            yield from functions.add(b',"strict":true' if tool.strict else b',"strict":false')
        yield from functions.add(b"}},")
        yield
    return functions.end_list() if tools else None


def _convert_tool_choice(choice: str | ResponsesToolChoice | None) -> object:
    if choice is None:
        return None
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise build_unsupported("tool_choice", choice, "auto, none, required or a function")
        return choice
    if choice.type != "function":
        raise build_unsupported("tool_choice.type", choice.type, "function")
    return {"type": "function", "function": {"name": choice.name}}


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
