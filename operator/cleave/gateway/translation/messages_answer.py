"""Translates chat completions into answers of Anthropic's Messages API. Pure.

Used by `translations` and, through `Answer`, by `proxy.translated_client`. Event by event as in
Anthropic's documentation, "Streaming messages": message_start, then blocks of content, each with
its start, deltas and stop, then message_delta and message_stop. How many tokens of the prompt were
cached is known at the end only: message_start counts them all as new, message_delta corrects it.
"""

from collections.abc import Mapping, Sequence

import msgspec

from cleave.gateway.http.error_dialects import build_anthropic_error, name_anthropic_type
from cleave.gateway.translation.answer import build_event, shorten_id
from cleave.gateway.translation.chat_types import (
    UNTRANSLATABLE,
    AnswerChoice,
    AnswerError,
    AnswerMessage,
    AnswerUsage,
    ChatAnswer,
    FunctionCall,
    ToolCall,
    decode_complete,
    decode_error,
    decode_tokenize,
)

Block = dict[str, object]

MAX_ARGUMENTS_BYTES = 512 << 10
"""Of a streamed tool call whose end is looked for; reading them takes 1 ms."""

_encode = msgspec.json.Encoder().encode
_check_object = msgspec.json.Decoder(msgspec.defstruct("_AnyObject", [])).decode
"""Reads a JSON object and keeps nothing: with its members it would take 10 times as long."""
_TYPES_BY_OPENAI = {
    "rate_limit_error": "rate_limit_error",
    "invalid_request_error": "invalid_request_error",
}


class MessagesAnswer:
    """One answer to /v1/messages."""

    def __init__(self) -> None:
        self._index = -1
        """Of the open block, or of the latest."""
        self._delta_prefix = b""
        """A delta of the open block up to its text."""
        self._has_tool_call = False
        self.text_bytes = 0
        self._arguments: bytearray | None = None
        """Of the open tool call; None: the open block is none, or they are too long."""
        self._is_call_complete = False
        """Whether the latest tool call can run: a stop string may have cut it short."""

    def build_body(self, body: bytes) -> bytes:
        """The message for a complete response. Raises msgspec.MsgspecError."""
        chat = decode_complete(body)
        choice = chat.choices[0] if chat.choices else AnswerChoice()
        blocks = _build_blocks(choice.message or AnswerMessage())
        self._has_tool_call = any(block["type"] == "tool_use" for block in blocks)
        self._is_call_complete = blocks[-1]["type"] == "tool_use"
        message = _build_message(chat, blocks) | self._describe_end(choice)
        return _encode(message | {"usage": _build_usage(chat.usage or AnswerUsage())})

    def build_error(self, status: int, body: bytes) -> bytes:
        """An error in Anthropic's form."""
        error = decode_error(body).error
        return build_anthropic_error(name_anthropic_type(status), error.message)

    def begin(self, event: ChatAnswer) -> bytes:
        """The message, still empty."""
        message = _build_message(event, []) | {"stop_reason": None, "stop_sequence": None}
        message["usage"] = _build_usage(event.usage or AnswerUsage())
        return build_event("message_start", {"message": message})

    def open_text(self) -> bytes:
        """A block of text begins."""
        return self._open({"type": "text", "text": ""}, "text_delta", "text")

    def open_reasoning(self) -> bytes:
        """A block of thinking begins."""
        block = {"type": "thinking", "thinking": "", "signature": ""}
        return self._open(block, "thinking_delta", "thinking")

    def open_tool_call(self, call_id: str, name: str) -> bytes:
        """A tool call begins."""
        self._has_tool_call, arguments = True, bytearray()
        block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        events = self._open(block, "input_json_delta", "partial_json")
        self._arguments = arguments
        return events

    def add_text(self, text: str) -> bytes:
        """More of the open block."""
        if self._arguments is not None:
            self._arguments += text.encode()
            self.text_bytes = len(self._arguments)
            if self.text_bytes > MAX_ARGUMENTS_BYTES:
                self._arguments, self.text_bytes, self._is_call_complete = None, 0, False
        return b"%b%b}}\n\n" % (self._delta_prefix, _encode(text))

    def close_block(self) -> Sequence[bytes]:
        """The open block is complete."""
        if self._arguments is not None:
            self._is_call_complete = _read_arguments(bytes(self._arguments)) is not None
        return (build_event("content_block_stop", {"index": self._index}),)

    def end(self, choice: AnswerChoice, usage: AnswerUsage) -> Sequence[bytes]:
        """Why the message ended, and its tokens."""
        # Clients read the first block of every message.
        block = (self.open_text(), *self.close_block()) if self._index < 0 else ()
        payload: Block = {"delta": self._describe_end(choice), "usage": _build_usage(usage)}
        return *block, build_event("message_delta", payload), build_event("message_stop", {})

    def fail(self, error: AnswerError) -> Sequence[bytes]:
        """The message breaks off."""
        kind = _TYPES_BY_OPENAI.get(error.type, "api_error")
        data = build_anthropic_error(kind, error.message)
        return (b"event: error\ndata: %b\n\n" % data,)

    def _open(self, block: Mapping[str, object], delta: str, key: str) -> bytes:
        self._index += 1
        self._arguments, self.text_bytes = None, 0
        # A delta is encoded for each token, so all of it but the text is built once.
        self._delta_prefix = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"%b","%b":' % (self._index, delta.encode(), key.encode())
        )
        return build_event("content_block_start", {"index": self._index, "content_block": block})

    def _describe_end(self, choice: AnswerChoice) -> Block:
        """The reason of the end, as vLLM maps it: a stop string may cut a tool call short."""
        reason, sequence = "end_turn", None
        if choice.finish_reason == "length":
            reason = "max_tokens"
        elif choice.finish_reason == "content_filter":
            reason = "refusal"
        elif isinstance(choice.stop_reason, str) and not self._is_call_complete:
            reason, sequence = "stop_sequence", choice.stop_reason
        elif choice.finish_reason == "tool_calls" or self._has_tool_call:
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": sequence}


class TokenCountAnswer:
    """One answer to /v1/messages/count_tokens."""

    def build_body(self, body: bytes) -> bytes:
        """The count of a response of /tokenize. Raises msgspec.MsgspecError."""
        return _encode({"input_tokens": decode_tokenize(body).count})

    def build_error(self, status: int, body: bytes) -> bytes:
        """An error in Anthropic's form."""
        return MessagesAnswer().build_error(status, body)


def _build_message(chat: ChatAnswer, blocks: list[Block]) -> Block:
    frame = {"id": f"msg_{shorten_id(chat.id)}", "type": "message", "role": "assistant"}
    return {**frame, "model": chat.model, "content": blocks}


def _build_usage(usage: AnswerUsage) -> Block:
    """Anthropic counts tokens that were read from the cache apart from the others."""
    cached = min(usage.cached_tokens, usage.prompt_tokens)
    counts: Block = {"input_tokens": usage.prompt_tokens - cached}
    counts |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    return counts | {"output_tokens": usage.output_tokens}


def _build_blocks(message: AnswerMessage) -> list[Block]:
    blocks: list[Block] = []
    if reasoning := message.reasoning or message.reasoning_content:
        blocks.append({"type": "thinking", "thinking": reasoning, "signature": ""})
    if message.content:
        blocks.append({"type": "text", "text": message.content})
    blocks += [_build_call_block(at, call) for at, call in enumerate(message.tool_calls or ())]
    return blocks or [{"type": "text", "text": ""}]


def _build_call_block(position: int, call: ToolCall) -> Block:
    """A tool call; one whose arguments are cut short or no JSON object becomes text, so that
    it cannot run."""
    function = call.function or FunctionCall()
    arguments = function.arguments or "{}"
    values = _read_arguments(arguments.encode())
    if values is None:
        return {"type": "text", "text": arguments}
    call_id = call.id or f"call_{position}"
    return {"type": "tool_use", "id": call_id, "name": function.name or "", "input": values}


def _read_arguments(text: bytes) -> msgspec.Raw | None:
    """The arguments of a tool call; None: they are cut short or no JSON object."""
    try:
        _check_object(text)
    except UNTRANSLATABLE:
        return None
    return msgspec.Raw(text)
