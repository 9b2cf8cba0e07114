"""Translates requests of Anthropic's Messages API into chat completions. Pure.

Used by `translations`. The mapping follows vLLM 0.32 (`entrypoints/anthropic/serving.py`), so that
both translate a prompt alike. Two differences: a final assistant message
is continued, as in Anthropic's API, and a budget of thinking tokens becomes an effort, because
engines refuse budgets unless they are configured for them.
"""

import msgspec

from cleave.gateway.http.completion_request import Fields
from cleave.gateway.http.errors import build_bad_request
from cleave.gateway.translation.request_fields import (
    INTEGER,
    Chat,
    build_unsupported,
    check_names,
    copy_engine_fields,
    decode_field,
)

_TRANSLATED = frozenset((
    "max_tokens", "messages", "metadata", "model", "output_config", "stop_sequences", "stream",
    "system", "thinking", "tool_choice", "tools",
))  # fmt: skip
_IGNORED = frozenset((
    "betas", "billing_policy", "cache_control", "compaction", "context_management", "diagnostics",
    "inference_geo", "service_tier", "speed", "user_profile_id", "workspace_id",
))  # fmt: skip
"""About prices, places and caches of Anthropic's service; an answer is the same without them."""
KNOWN = _TRANSLATED | _IGNORED
REFUSED = {
    "container": "nothing runs code here",
    "fallback_credit_token": "name another model in model",
    "fallbacks": "name another model in model",
    "mcp_servers": "connect to MCP servers in the client and send their tools in tools",
    "thread": "send the whole conversation in messages",
}
_ATTRIBUTION = "x-anthropic-billing-header"
"""Beginning of a block with a hash of each request, which would make every prompt a new one."""
_LOW_EFFORT_TOKENS = 4_096
_MEDIUM_EFFORT_TOKENS = 16_384
"""Budgets of thinking below these become efforts of low and medium; larger ones high."""


class ImageSource(msgspec.Struct, gc=False):
    """An image, or the text of a document."""

    type: str
    media_type: str = "image/jpeg"
    data: str = ""
    url: str = ""


class Block(msgspec.Struct, gc=False):
    """A block of content, of any type."""

    type: str
    text: str = ""
    thinking: str = ""
    source: ImageSource | None = None
    id: str = ""
    name: str = ""
    input: msgspec.Raw = msgspec.Raw(b"{}")
    tool_use_id: str = ""
    content: "str | list[Block] | None" = None


class ConversationTurn(msgspec.Struct, gc=False):
    """A turn of the conversation."""

    role: str
    content: str | list[Block]


class MessagesTool(msgspec.Struct, gc=False):
    """A tool that the client runs."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: msgspec.Raw = msgspec.Raw(b'{"type":"object"}')
    strict: bool | None = None


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


class MessagesMetadata(msgspec.Struct, gc=False):
    """About the request."""

    user_id: str | None = None


_MESSAGES = msgspec.json.Decoder(list[ConversationTurn])
_METADATA = msgspec.json.Decoder(MessagesMetadata)
_OUTPUT_CONFIG = msgspec.json.Decoder(OutputConfig)
_SYSTEM: msgspec.json.Decoder[str | list[Block]] = msgspec.json.Decoder(str | list[Block])
_THINKING: msgspec.json.Decoder[Thinking | None] = msgspec.json.Decoder(Thinking | None)
_TOOLS = msgspec.json.Decoder(list[MessagesTool])
_TOOL_CHOICE: msgspec.json.Decoder[MessagesToolChoice | None] = msgspec.json.Decoder(
    MessagesToolChoice | None
)


def convert_messages_request(fields: Fields) -> Chat:
    """The chat completion of a request to /v1/messages. Raises GatewayError (400)."""
    check_names(fields, KNOWN, REFUSED)
    chat = copy_engine_fields(fields)
    chat |= _convert_prompt(fields)
    if "max_tokens" not in fields:
        raise build_bad_request(
            "you must provide max_tokens: the limit of the answer", "max_tokens"
        )
    limit = decode_field(fields, "max_tokens", INTEGER, 0)
    if limit < 1:
        raise build_bad_request(f"max_tokens is {limit}: it must be at least 1", "max_tokens")
    chat["max_completion_tokens"] = limit
    if "stop_sequences" in fields:
        chat["stop"] = fields["stop_sequences"]
    metadata = decode_field(fields, "metadata", _METADATA, MessagesMetadata())
    if metadata.user_id is not None:
        chat["user"] = metadata.user_id
    chat |= _convert_tool_choice(decode_field(fields, "tool_choice", _TOOL_CHOICE, None))
    output = decode_field(fields, "output_config", _OUTPUT_CONFIG, OutputConfig())
    effort = output.effort or _choose_effort(decode_field(fields, "thinking", _THINKING, None))
    if effort is not None:
        chat["reasoning_effort"] = effort
    if output.format is not None:
        schema = {"name": "answer", "schema": output.format.schema}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    return chat


def convert_count_request(fields: Fields) -> Chat:
    """The request to /tokenize for one to /v1/messages/count_tokens. Raises GatewayError (400)."""
    check_names(fields, KNOWN, REFUSED)
    chat = _convert_prompt(fields)
    for name in ("model", "chat_template_kwargs"):
        if name in fields:
            chat[name] = fields[name]
    return chat


def _convert_prompt(fields: Fields) -> Chat:
    """`messages` and `tools`, and how the prompt ends."""
    messages: list[Chat] = []
    system = decode_field(fields, "system", _SYSTEM, "")
    if text := _join_system_text(system, "system"):
        messages.append({"role": "system", "content": text})
    if "messages" not in fields:
        raise build_bad_request("you must provide messages: the conversation", "messages")
    turns = decode_field(fields, "messages", _MESSAGES, [])
    if not turns:
        raise build_bad_request("messages is empty: send at least one", "messages")
    for number, turn in enumerate(turns):
        messages += _convert_turn(turn, f"messages[{number}]")
    prompt: Chat = {"messages": messages}
    if turns[-1].role == "assistant":
        # The answer goes on where the client's beginning of it ends.
        prompt |= {"continue_final_message": True, "add_generation_prompt": False}
    tools = decode_field(fields, "tools", _TOOLS, [])
    if tools:
        prompt["tools"] = [_convert_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools)]
    return prompt


def _join_system_text(content: str | list[Block], path: str) -> str:
    blocks = [Block("text", content)] if isinstance(content, str) else content
    for at, block in enumerate(blocks):
        if block.type != "text":
            raise build_unsupported(f"{path}[{at}].type", block.type, "text")
    return "".join([each.text for each in blocks if not each.text.startswith(_ATTRIBUTION)])


def _convert_turn(turn: ConversationTurn, path: str) -> list[Chat]:
    """The chat messages of one turn: results of tools are messages of their own."""
    if turn.role == "system":
        text = _join_system_text(turn.content, f"{path}.content")
        return [{"role": "system", "content": text}] if text else []
    if turn.role not in ("user", "assistant"):
        raise build_unsupported(f"{path}.role", turn.role, "user, assistant or system")
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    if turn.role == "assistant":
        return [_convert_assistant_blocks(turn.content, f"{path}.content")]
    return _convert_user_blocks(turn.content, f"{path}.content")


def _convert_assistant_blocks(blocks: list[Block], path: str) -> Chat:
    texts, calls, thoughts = [], [], []
    for at, block in enumerate(blocks):
        if block.type == "text":
            texts.append(block.text)
        elif block.type == "tool_use":
            arguments = bytes(block.input).decode()
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type == "thinking":
            thoughts.append(block.thinking)
        elif block.type != "redacted_thinking":
            allowed = "text, thinking or tool_use"
            raise build_unsupported(f"{path}[{at}].type", block.type, allowed)
    message: Chat = {"role": "assistant"}
    if texts or not calls:
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _convert_user_blocks(blocks: list[Block], path: str) -> list[Chat]:
    messages: list[Chat] = []
    parts: list[Chat] = []
    for at, block in enumerate(blocks):
        place = f"{path}[{at}]"
        if block.type == "tool_result":
            text, images = _convert_tool_result(block.content, f"{place}.content")
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
            parts += images
        else:
            parts.append(_convert_part(block, place))
    if len(parts) == 1 and parts[0]["type"] == "text":
        messages.append({"role": "user", "content": parts[0]["text"]})
    elif parts or not messages:
        messages.append({"role": "user", "content": parts})
    return messages


def _convert_tool_result(content: str | list[Block] | None, path: str) -> tuple[str, list[Chat]]:
    """(its text, its images), because the messages of tools contain text only."""
    if isinstance(content, str) or content is None:
        return content or "", []
    parts = [_convert_part(block, f"{path}[{at}]") for at, block in enumerate(content)]
    texts = [part["text"] for part in parts if part["type"] == "text"]
    return "\n".join(texts), [part for part in parts if part["type"] != "text"]


def _convert_part(block: Block, path: str) -> Chat:
    if block.type == "text":
        return {"type": "text", "text": block.text}
    source = block.source
    if block.type == "image" and source is not None and source.type in ("base64", "url"):
        data_url = f"data:{source.media_type};base64,{source.data}"
        url = source.url if source.type == "url" else data_url
        return {"type": "image_url", "image_url": {"url": url}}
    if block.type == "document" and source is not None and source.type == "text":
        return {"type": "text", "text": source.data}
    if source is not None and block.type in ("image", "document"):
        raise build_unsupported(
            f"{path}.source.type", source.type, "base64 or url for images, text for documents"
        )
    raise build_unsupported(f"{path}.type", block.type, "text, image, document or tool_result")


def _convert_tool(tool: MessagesTool, path: str) -> Chat:
    if tool.type not in (None, "custom"):
        raise build_unsupported(f"{path}.type", tool.type, "tools that the client runs")
    function: Chat = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _convert_tool_choice(choice: MessagesToolChoice | None) -> Chat:
    if choice is None:
        return {}
    chat: Chat = {"parallel_tool_calls": False} if choice.disable_parallel_tool_use else {}
    if choice.type == "tool":
        if not choice.name:
            raise build_bad_request("tool_choice.name must name the tool", "tool_choice.name")
        return chat | {"tool_choice": {"type": "function", "function": {"name": choice.name}}}
    names = {"auto": "auto", "any": "required", "none": "none"}
    if choice.type not in names:
        raise build_unsupported("tool_choice.type", choice.type, "auto, any, tool or none")
    return chat | {"tool_choice": names[choice.type]}


def _choose_effort(thinking: Thinking | None) -> str | None:
    """The effort that stands for a budget of thinking; None: the model's own."""
    if thinking is None or thinking.type == "adaptive":
        return None
    if thinking.type == "disabled":
        return "none"
    if thinking.type != "enabled":
        raise build_unsupported("thinking.type", thinking.type, "enabled, disabled or adaptive")
    if thinking.budget_tokens < _LOW_EFFORT_TOKENS:
        return "low"
    return "medium" if thinking.budget_tokens < _MEDIUM_EFFORT_TOKENS else "high"
