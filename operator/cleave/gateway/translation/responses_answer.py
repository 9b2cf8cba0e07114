"""Translates chat completions into answers of OpenAI's Responses API. Pure.

Used by `translations` and, through `Answer`, by `proxy.translated_client`. Event by event as in
OpenAI's reference of streaming events: response.created and response.in_progress, then items
(reasoning, a message, calls of functions), each with its added, delta and done events, then
response.completed, response.incomplete or response.failed. What is hard: the done events repeat the
text of a block and the last one the whole answer, so both are kept until the end, as they are sent.
"""

from collections.abc import Callable, Sequence
from functools import partial
from time import time
from types import MappingProxyType

import msgspec

from cleave.gateway.http.completion_request import Fields
from cleave.gateway.translation.answer import build_event, shorten_id
from cleave.gateway.translation.chat_types import (
    AnswerChoice,
    AnswerError,
    AnswerMessage,
    AnswerUsage,
    ChatAnswer,
    FunctionCall,
    decode_complete,
)
from cleave.gateway.translation.response_items import (
    TEXT,
    CallBlock,
    FreeTextBlock,
    Item,
    ItemBlock,
    ReasoningBlock,
    TextBlock,
    fill_texts,
)
from cleave.gateway.translation.responses_tools import ToolName, ToolNames

_encode = msgspec.json.Encoder().encode
_decode_text = msgspec.json.Decoder(str).decode
_DEFAULTS: Item = {
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "prompt_cache_key": None, "reasoning": None,
    "safety_identifier": None, "service_tier": "default", "temperature": None,
    "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_logprobs": 0,
    "top_p": None, "truncation": "disabled", "user": None,
}  # fmt: skip
"""Fields of the request that the answer repeats, with their values if the request has none."""
_MAX_REPEATED_BYTES = 32 << 10
"""Longer ones are not repeated: each answer would copy them up to three times."""
PIECE_BYTES = 32 << 10
"""Of a text that is kept."""
ITEM_BYTES = 8 << 10
"""Of text take as long to repeat as an item without text."""
FREE_TEXT_WEIGHT = 4
"""Text that is read when it is complete counts so many times."""
_NO_TOOLS: ToolNames = MappingProxyType({})
_INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ERROR_CODES = {
    "rate_limit_error": "rate_limit_exceeded",
    "invalid_request_error": "invalid_prompt",
}


class ResponsesAnswer:
    """One answer to /v1/responses."""

    def __init__(self, fields: Fields, tools: ToolNames = _NO_TOOLS) -> None:
        """`fields`: of the request; `tools`: by the names that the engine knows."""
        self._tools = tools
        self._request = _DEFAULTS | {
            name: value
            for name, value in fields.items()
            if name in _DEFAULTS and len(value) <= _MAX_REPEATED_BYTES
        }
        self._id = ""
        self._created_at = 0
        self._model = ""
        self._sequence = 0
        """Number of the next event."""
        self.text_bytes = 0
        self._output: list[ItemBlock] = []
        """Complete items."""
        self._block: ItemBlock | None = None
        """The open one."""
        self._text: list[bytes] = []
        """Of the open block, as JSON without its quotes."""
        self._text_end = bytearray()
        """The end of that text."""
        self._delta_prefix = b""
        """A delta of the open block up to its text; empty: its text is sent when it is complete."""

    def build_body(self, body: bytes) -> bytes:
        """The response object for a complete response. Raises msgspec.MsgspecError."""
        chat = decode_complete(body)
        self._set_frame(chat)
        choice = chat.choices[0] if chat.choices else AnswerChoice()
        for block, text in self._list_blocks(choice.message or AnswerMessage()):
            block.text = (_encode(block.read_text(text))[1:-1],)
            self._output.append(block)
        data = _encode(self._build_ended(choice, chat.usage or AnswerUsage()))
        return b"".join(fill_texts(data, [block.text for block in self._output]))

    def build_error(self, status: int, body: bytes) -> bytes:
        """Errors have OpenAI's form already."""
        del status
        return body

    def begin(self, event: ChatAnswer) -> bytes:
        """The response, still empty."""
        self._set_frame(event)
        response = self._build_response("in_progress")
        created = self._build_event("response.created", {"response": response})
        return created + self._build_event("response.in_progress", {"response": response})

    def open_text(self) -> bytes:
        """A message begins."""
        return self._open(TextBlock(self._make_item_id("msg")))

    def open_reasoning(self) -> bytes:
        """Reasoning begins."""
        return self._open(ReasoningBlock(self._make_item_id("rs")))

    def open_tool_call(self, call_id: str, name: str) -> bytes:
        """A call of a function begins."""
        self.text_bytes += len(call_id) + len(name)
        return self._open(self._make_call(self._make_item_id, call_id, name))

    def add_text(self, text: str) -> bytes:
        """More of the open block."""
        encoded = _encode(text)
        self._text_end += encoded[1:-1]
        self.text_bytes += len(encoded)
        if len(self._text_end) >= PIECE_BYTES:
            self._text.append(bytes(self._text_end))
            self._text_end = bytearray()
        if not self._delta_prefix:
            self.text_bytes += len(encoded) * (FREE_TEXT_WEIGHT - 1)
            return b""
        number, self._sequence = self._sequence, self._sequence + 1
        return b'%b%b,"sequence_number":%d}\n\n' % (self._delta_prefix, encoded, number)

    def close_block(self) -> Sequence[bytes]:
        """The open block is complete."""
        block, place = self._complete_block(), len(self._output)
        at: Item = {"item_id": block.item_id, "output_index": place}
        if block.part is not None:
            at["content_index"] = 0
        done: list[tuple[str, Item]] = []
        if block.is_buffered and any(block.text):
            done.append((f"{block.event}.delta", {**at, "delta": TEXT}))
        done.append((f"{block.event}.done", {**at, **block.describe_text(TEXT)}))
        if block.part is not None:
            done.append(("response.content_part.done", {**at, "part": block.build_part(TEXT)}))
        item = block.build_item(TEXT, block.status)
        done.append(("response.output_item.done", {"output_index": place, "item": item}))
        self._output.append(block)
        pieces: list[bytes] = []
        for name, payload in done:
            pieces += fill_texts(self._build_event(name, payload), [block.text])
        return pieces

    def end(self, choice: AnswerChoice, usage: AnswerUsage) -> Sequence[bytes]:
        """The complete response."""
        return self._build_last(self._build_ended(choice, usage))

    def fail(self, error: AnswerError) -> Sequence[bytes]:
        """The response breaks off."""
        if self._block is not None:
            block = self._complete_block()
            block.status = "incomplete"
            self._output.append(block)
        code = _ERROR_CODES.get(error.type, "server_error")
        failure = {"error": {"code": code, "message": error.message}}
        return self._build_last(self._build_response("failed") | failure)

    def _complete_block(self) -> ItemBlock:
        block, self._block = self._block, None
        assert block is not None
        block.text = [*self._text, bytes(self._text_end)]
        if block.is_buffered:
            text = _decode_text(b'"%b"' % b"".join(block.text))
            block.text = (_encode(block.read_text(text))[1:-1],)
        self._text, self._text_end = [], bytearray()
        return block

    def _build_last(self, response: Item) -> Sequence[bytes]:
        data = self._build_event(f"response.{response['status']}", {"response": response})
        return fill_texts(data, [block.text for block in self._output])

    def _set_frame(self, chat: ChatAnswer) -> None:
        self._id, self._model = shorten_id(chat.id), chat.model
        self._created_at = chat.created or int(time())

    def _make_item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._id}_{len(self._output)}"

    def _make_call(self, make_id: Callable[[str], str], call_id: str, function: str) -> ItemBlock:
        tool = self._tools.get(function) or ToolName(function)
        if tool.is_free_text:
            return FreeTextBlock(make_id("ctc"), call_id, tool)
        return CallBlock(make_id("fc"), call_id, tool)

    def _list_blocks(self, message: AnswerMessage) -> list[tuple[ItemBlock, str]]:
        """(block, its text) of a complete message."""
        name = f"{self._id}_%d"
        blocks: list[tuple[ItemBlock, str]] = []
        if reasoning := message.reasoning or message.reasoning_content:
            blocks.append((ReasoningBlock(f"rs_{name % 0}"), reasoning))
        if message.content:
            blocks.append((TextBlock(f"msg_{name % len(blocks)}"), message.content))
        for at, call in enumerate(message.tool_calls or ()):
            function = call.function or FunctionCall()
            call_id, number = call.id or f"call_{at}", name % len(blocks)
            make_id = partial("{1}_{0}".format, number)
            call_block = self._make_call(make_id, call_id, function.name or "")
            blocks.append((call_block, function.arguments or ""))
        return blocks

    def _open(self, block: ItemBlock) -> bytes:
        self._block, index = block, len(self._output)
        self.text_bytes += ITEM_BYTES
        item = block.build_item("", "in_progress")
        payload: Item = {"output_index": index, "item": item}
        events = self._build_event("response.output_item.added", payload)
        place: Item = {"item_id": block.item_id, "output_index": index}
        if block.part is not None:
            place["content_index"] = 0
            added = {**place, "part": block.build_part("")}
            events += self._build_event("response.content_part.added", added)
        # A delta is encoded for each token, so all of it but text and number is built once.
        kind = f"{block.event}.delta"
        fields = _encode({"type": kind, **place, **block.delta_fields})[:-1]
        self._delta_prefix = b""
        if not block.is_buffered:
            self._delta_prefix = b'event: %b\ndata: %b,"delta":' % (kind.encode(), fields)
        return events

    def _build_ended(self, choice: AnswerChoice, usage: AnswerUsage) -> Item:
        reason = _INCOMPLETE_REASONS.get(choice.finish_reason or "")
        if self._output and choice.finish_reason == "length":
            self._output[-1].status = "incomplete"
        response = self._build_response("completed" if reason is None else "incomplete")
        if reason is None:
            response["completed_at"] = int(time())
        else:
            response["incomplete_details"] = {"reason": reason}
        response["usage"] = _build_usage(usage)
        return response

    def _build_response(self, status: str) -> Item:
        frame: Item = {"id": f"resp_{self._id}", "object": "response", "status": status}
        frame |= {"created_at": self._created_at, "model": self._model}
        frame["output"] = [block.build_item(TEXT, block.status) for block in self._output]
        frame |= {"background": False, "error": None, "incomplete_details": None}
        return frame | self._request | {"previous_response_id": None, "store": False, "usage": None}

    def _build_event(self, name: str, payload: Item) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return build_event(name, {**payload, "sequence_number": number})


def _build_usage(usage: AnswerUsage) -> Item:
    counts: Item = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.output_tokens}
    counts["input_tokens_details"] = {
        "cached_tokens": usage.cached_tokens, "cache_write_tokens": 0,
    }  # fmt: skip
    counts["output_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return counts | {"total_tokens": usage.prompt_tokens + usage.output_tokens}
