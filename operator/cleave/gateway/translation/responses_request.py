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
    FLAG,
    INTEGER,
    TEXT,
    TEXTS,
    Chat,
    build_unsupported,
    check_names,
    copy_engine_fields,
    decode_field,
)

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
    text: str = ""
    refusal: str = ""
    image_url: str | None = None
    detail: str | None = None


class Item(msgspec.Struct, gc=False):
    """An item of the input, of any type."""

    type: str = "message"
    role: str = ""
    content: str | list[Part] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: str | list[Part] = ""
    summary: list[Part] | None = None


class ResponsesTool(msgspec.Struct, gc=False):
    """A tool that the client runs."""

    type: str
    name: str = ""
    description: str | None = None
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


_INPUT: msgspec.json.Decoder[str | list[Item]] = msgspec.json.Decoder(str | list[Item])
_LIMIT: msgspec.json.Decoder[int | None] = msgspec.json.Decoder(int | None)
_REASONING = msgspec.json.Decoder(Reasoning)
_TEXT_CONFIG = msgspec.json.Decoder(TextConfig)
_TOOLS = msgspec.json.Decoder(list[ResponsesTool])
_TOOL_CHOICE: msgspec.json.Decoder[str | ResponsesToolChoice | None] = msgspec.json.Decoder(
    str | ResponsesToolChoice | None
)


def convert_responses_request(fields: Fields) -> Chat:
    """The chat completion of a request to /v1/responses. Raises GatewayError (400)."""
    check_names(fields, KNOWN, REFUSED)
    _refuse_values(fields)
    chat = copy_engine_fields(fields)
    for name in ("service_tier", "user"):
        if name in fields:
            chat[name] = fields[name]
    chat["messages"] = _convert_input(fields)
    limit = decode_field(fields, "max_output_tokens", _LIMIT, None)
    if limit is not None:
        if limit < 1:
            message = f"max_output_tokens is {limit}: it must be at least 1"
            raise build_bad_request(message, "max_output_tokens")
        chat["max_completion_tokens"] = limit
    tools = decode_field(fields, "tools", _TOOLS, [])
    if tools:
        chat["tools"] = [_convert_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)]
        if "parallel_tool_calls" in fields:
            chat["parallel_tool_calls"] = fields["parallel_tool_calls"]
    choice = _convert_tool_choice(decode_field(fields, "tool_choice", _TOOL_CHOICE, None))
    if choice is not None and tools:
        chat["tool_choice"] = choice
    reasoning = decode_field(fields, "reasoning", _REASONING, Reasoning())
    if reasoning.effort is not None:
        chat["reasoning_effort"] = reasoning.effort
    output_format = _convert_format(decode_field(fields, "text", _TEXT_CONFIG, TextConfig()))
    if output_format is not None:
        chat["response_format"] = output_format
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


def _convert_input(fields: Fields) -> list[Chat]:
    if "input" not in fields:
        raise build_bad_request("you must provide input: a text or a list of items", "input")
    given = decode_field(fields, "input", _INPUT, "")
    items = [Item(role="user", content=given)] if isinstance(given, str) else given
    if not items:
        raise build_bad_request("input is empty: send at least one item", "input")
    turns: list[Chat] = []
    if instructions := decode_field(fields, "instructions", TEXT, ""):
        turns.append({"role": "system", "content": [instructions]})
    for at, item in enumerate(items):
        _add_item(turns, item, f"input[{at}]")
    return [_build_message(turn) for turn in turns]


def _build_message(turn: Chat) -> Chat:
    """A message from a turn whose texts were collected; copying them item by item would take
    quadratic time."""
    separator = "" if turn["role"] == "assistant" else "\n\n"
    for name in ("reasoning", "content"):
        if name in turn and turn["role"] in ("assistant", "system"):
            turn[name] = separator.join(turn[name])
    return turn


def _add_item(turns: list[Chat], item: Item, path: str) -> None:
    """Append an item's turn, or extend the last one."""
    if item.type == "message":
        _add_message(turns, item, path)
    elif item.type == "function_call":
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        _get_model_turn(turns).setdefault("tool_calls", []).append(call)
    elif item.type == "function_call_output":
        text = _join_text(item.output, f"{path}.output")
        turns.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
    elif item.type == "reasoning":
        parts = item.content if isinstance(item.content, list) and item.content else item.summary
        turn = _get_model_turn(turns, begins=True)
        turn.setdefault("reasoning", []).extend([part.text for part in parts or ()])
    else:
        allowed = "message, function_call, function_call_output or reasoning"
        raise build_unsupported(f"{path}.type", item.type, allowed)


def _add_message(turns: list[Chat], item: Item, path: str) -> None:
    if item.role == "assistant":
        text = _join_text(item.content, f"{path}.content")
        _get_model_turn(turns).setdefault("content", []).append(text)
    elif item.role in ("system", "developer"):
        text = _join_text(item.content, f"{path}.content")
        if turns and turns[-1]["role"] == "system":
            # Chat templates of many models accept one system message only.
            turns[-1]["content"].append(text)
        else:
            turns.append({"role": "system", "content": [text]})
    elif item.role == "user":
        turns.append({"role": "user", "content": _convert_parts(item.content, path)})
    else:
        raise build_unsupported(f"{path}.role", item.role, "user, assistant, system or developer")


def _get_model_turn(turns: list[Chat], begins: bool = False) -> Chat:
    """The model's turn at the end of the conversation; `begins`: a new one, unless it only thinks.
    A model thinks before it writes, so that reasoning after text belongs to another turn."""
    last = turns[-1] if turns else None
    is_model = last is not None and last["role"] == "assistant"
    if last is None or not is_model or (begins and ("content" in last or "tool_calls" in last)):
        turns.append({"role": "assistant"})
    return turns[-1]


def _join_text(content: str | list[Part] | None, path: str) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    for at, part in enumerate(content):
        if part.type not in ("input_text", "output_text", "text", "refusal"):
            raise build_unsupported(f"{path}[{at}].type", part.type, "text")
    return "".join([part.text or part.refusal for part in content])


def _convert_parts(content: str | list[Part] | None, path: str) -> str | list[Chat]:
    """A user's content: its text, or parts with pictures."""
    parts = content if isinstance(content, list) else [Part("input_text", content or "")]
    translated = [_convert_part(part, f"{path}.content[{at}]") for at, part in enumerate(parts)]
    if len(translated) == 1 and "text" in translated[0]:
        return str(translated[0]["text"])
    return translated


def _convert_part(part: Part, path: str) -> Chat:
    if part.type in ("input_text", "text"):
        return {"type": "text", "text": part.text}
    if part.type == "input_image":
        if part.image_url is None:
            message = "nothing is stored here, so send the picture as a URL or a data URL"
            raise build_bad_request(f"{path}.image_url is missing: {message}", f"{path}.image_url")
        image = {"url": part.image_url} | ({"detail": part.detail} if part.detail else {})
        return {"type": "image_url", "image_url": image}
    raise build_unsupported(f"{path}.type", part.type, "input_text or input_image")


def _convert_tool(tool: ResponsesTool, path: str) -> Chat:
    if tool.type != "function":
        raise build_unsupported(f"{path}.type", tool.type, "function, which the client runs")
    if not tool.name:
        raise build_bad_request(f"{path}.name must name the function", f"{path}.name")
    function: Chat = {"name": tool.name, "parameters": tool.parameters}
    optional: Chat = {"description": tool.description, "strict": tool.strict}
    function |= {name: value for name, value in optional.items() if value is not None}
    return {"type": "function", "function": function}


def _convert_tool_choice(choice: str | ResponsesToolChoice | None) -> str | Chat | None:
    if choice is None:
        return None
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise build_unsupported("tool_choice", choice, "auto, none, required or a function")
        return choice
    if choice.type != "function":
        raise build_unsupported("tool_choice.type", choice.type, "function")
    return {"type": "function", "function": {"name": choice.name}}


def _convert_format(config: TextConfig) -> Chat | None:
    chosen = config.format
    if chosen is None or chosen.type == "text":
        return None
    if chosen.type == "json_object":
        return {"type": "json_object"}
    if chosen.type != "json_schema":
        allowed = "text, json_object or json_schema"
        raise build_unsupported("text.format.type", chosen.type, allowed)
    schema: Chat = {"name": chosen.name, "schema": chosen.schema}
    if chosen.strict is not None:
        schema["strict"] = chosen.strict
    return {"type": "json_schema", "json_schema": schema}
