"""Translates chat completions into answers of OpenAI's Responses API. Pure.

Used by `translations` and, through `Answer`, by `proxy.translated_client`. Event by event as in
OpenAI's reference of streaming events: response.created and response.in_progress, then items
(reasoning, a message, calls of functions), each with its added, delta and done events, then
response.completed, response.incomplete or response.failed. What is hard: the done events repeat the
text of a block and the last one the whole answer, so both are kept until the end.
"""

from collections.abc import Callable
from functools import partial
from time import time

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
from cleave.gateway.translation.responses_tools import ToolName, ToolNames

Item = dict[str, object]


class FreeText(msgspec.Struct, gc=False):
    """The arguments of a call of a tool that takes free text."""

    input: str


_decode_free_text = msgspec.json.Decoder(FreeText).decode
_encode = msgspec.json.Encoder().encode
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
_INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ERROR_CODES = {
    "rate_limit_error": "rate_limit_exceeded",
    "invalid_request_error": "invalid_prompt",
}


class ResponsesAnswer:
    """One answer to /v1/responses."""

    def __init__(self, fields: Fields, tools: ToolNames) -> None:
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
        self._output: list[Item] = []
        """Complete items."""
        self._block: _ItemBlock | None = None
        """The open one."""
        self._text: list[str] = []
        """Of the open block."""
        self._delta_prefix = b""
        """A delta of the open block up to its text; empty: its text is sent when it is complete."""

    def build_body(self, body: bytes) -> bytes:
        """The response object for a complete response. Raises msgspec.MsgspecError."""
        chat = decode_complete(body)
        self._set_frame(chat)
        choice = chat.choices[0] if chat.choices else AnswerChoice()
        for block, text in self._list_blocks(choice.message or AnswerMessage()):
            self._output.append(block.build_item(block.read_text(text), "completed"))
        return _encode(self._build_ended(choice, chat.usage or AnswerUsage()))

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
        return self._open(_TextBlock(self._make_item_id("msg")))

    def open_reasoning(self) -> bytes:
        """Reasoning begins."""
        return self._open(_ReasoningBlock(self._make_item_id("rs")))

    def open_tool_call(self, call_id: str, name: str) -> bytes:
        """A call of a function begins."""
        return self._open(self._make_call(self._make_item_id, call_id, name))

    def add_text(self, text: str) -> bytes:
        """More of the open block."""
        self._text.append(text)
        if not self._delta_prefix:
            return b""
        number, self._sequence = self._sequence, self._sequence + 1
        return b'%b%b,"sequence_number":%d}\n\n' % (self._delta_prefix, _encode(text), number)

    def close_block(self) -> bytes:
        """The open block is complete."""
        block, self._block = self._block, None
        assert block is not None
        text = block.read_text("".join(self._text))
        place: Item = {"item_id": block.item_id, "output_index": len(self._output)}
        if block.part is not None:
            place["content_index"] = 0
        events = b""
        if not self._delta_prefix and text:
            events = self._build_event(f"{block.event}.delta", {**place, "delta": text})
        events += self._build_event(f"{block.event}.done", {**place, **block.describe_text(text)})
        if block.part is not None:
            part = block.build_part(text)
            events += self._build_event("response.content_part.done", {**place, "part": part})
        item = block.build_item(text, "completed")
        done = {"output_index": len(self._output), "item": item}
        self._output.append(item)
        return events + self._build_event("response.output_item.done", done)

    def end(self, choice: AnswerChoice, usage: AnswerUsage) -> bytes:
        """The complete response."""
        response = self._build_ended(choice, usage)
        return self._build_event(f"response.{response['status']}", {"response": response})

    def fail(self, error: AnswerError) -> bytes:
        """The response breaks off."""
        if self._block is not None:
            text = self._block.read_text("".join(self._text))
            self._output.append(self._block.build_item(text, "incomplete"))
        code = _ERROR_CODES.get(error.type, "server_error")
        failure = {"error": {"code": code, "message": error.message}}
        response = self._build_response("failed") | failure
        return self._build_event("response.failed", {"response": response})

    def _set_frame(self, chat: ChatAnswer) -> None:
        self._id, self._model = shorten_id(chat.id), chat.model
        self._created_at = chat.created or int(time())

    def _make_item_id(self, prefix: str) -> str:
        return f"{prefix}_{self._id}_{len(self._output)}"

    def _make_call(
        self, make_id: Callable[[str], str], call_id: str, function: str
    ) -> "_ItemBlock":
        tool = self._tools.get(function) or ToolName(function)
        if tool.is_free_text:
            return _FreeTextBlock(make_id("ctc"), call_id, tool)
        return _CallBlock(make_id("fc"), call_id, tool)

    def _list_blocks(self, message: AnswerMessage) -> "list[tuple[_ItemBlock, str]]":
        """(block, its text) of a complete message."""
        name = f"{self._id}_%d"
        blocks: list[tuple[_ItemBlock, str]] = []
        if reasoning := message.reasoning or message.reasoning_content:
            blocks.append((_ReasoningBlock(f"rs_{name % 0}"), reasoning))
        if message.content:
            blocks.append((_TextBlock(f"msg_{name % len(blocks)}"), message.content))
        for at, call in enumerate(message.tool_calls or ()):
            function = call.function or FunctionCall()
            call_id, number = call.id or f"call_{at}", name % len(blocks)
            make_id = partial("{1}_{0}".format, number)
            call_block = self._make_call(make_id, call_id, function.name or "")
            blocks.append((call_block, function.arguments or ""))
        return blocks

    def _open(self, block: "_ItemBlock") -> bytes:
        self._block, index = block, len(self._output)
        self._text.clear()
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
        response = self._build_response("completed" if reason is None else "incomplete")
        if reason is None:
            response["completed_at"] = int(time())
        else:
            response["incomplete_details"] = {"reason": reason}
            if self._output and choice.finish_reason == "length":
                self._output[-1] |= {"status": "incomplete"}
        response["usage"] = _build_usage(usage)
        return response

    def _build_response(self, status: str) -> Item:
        frame: Item = {"id": f"resp_{self._id}", "object": "response", "status": status}
        frame |= {"created_at": self._created_at, "model": self._model, "output": self._output}
        frame |= {"background": False, "error": None, "incomplete_details": None}
        return frame | self._request | {"previous_response_id": None, "store": False, "usage": None}

    def _build_event(self, name: str, payload: Item) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return build_event(name, {**payload, "sequence_number": number})


class _ItemBlock:
    """An item of the answer and how its events are named."""

    event = ""
    part: str | None = None
    """Type of its content; None: it has no content."""
    delta_fields: Item = {}  # noqa: RUF012 - never changed
    is_buffered = False
    """Whether its text is sent when it is complete."""

    def __init__(self, item_id: str) -> None:
        self.item_id = item_id

    def build_item(self, text: str, status: str) -> Item:
        """The item with so much text."""
        raise NotImplementedError

    def build_part(self, text: str) -> Item:
        """Its content."""
        return {"type": self.part, "text": text}

    def describe_text(self, text: str) -> Item:
        """Its text in a done event."""
        return {"text": text}

    def read_text(self, text: str) -> str:
        """Its text, from what the engine wrote."""
        return text


class _TextBlock(_ItemBlock):
    event = "response.output_text"
    part = "output_text"
    delta_fields: Item = {"logprobs": []}  # noqa: RUF012

    def build_item(self, text: str, status: str) -> Item:
        content = [] if status == "in_progress" else [self.build_part(text)]
        item: Item = {"id": self.item_id, "type": "message", "status": status}
        return item | {"role": "assistant", "content": content}

    def build_part(self, text: str) -> Item:
        return {"type": self.part, "text": text, "annotations": [], "logprobs": []}

    def describe_text(self, text: str) -> Item:
        return {"text": text, "logprobs": []}


class _ReasoningBlock(_ItemBlock):
    event = "response.reasoning_text"
    part = "reasoning_text"

    def build_item(self, text: str, status: str) -> Item:
        content = [] if status == "in_progress" else [self.build_part(text)]
        item: Item = {"id": self.item_id, "type": "reasoning", "status": status}
        return item | {"summary": [], "content": content}


class _CallBlock(_ItemBlock):
    event = "response.function_call_arguments"

    def __init__(self, item_id: str, call_id: str, tool: ToolName) -> None:
        super().__init__(item_id)
        self._call_id = call_id
        self._tool = tool

    def build_item(self, text: str, status: str) -> Item:
        item: Item = {"id": self.item_id, "type": "function_call", "status": status}
        if self._tool.namespace is not None:
            item["namespace"] = self._tool.namespace
        return item | {"call_id": self._call_id, "name": self._tool.name, "arguments": text}

    def describe_text(self, text: str) -> Item:
        return {"name": self._tool.name, "arguments": text}


class _FreeTextBlock(_CallBlock):
    """A call of a tool that takes free text, which the engine writes as an argument."""

    event = "response.custom_tool_call_input"
    is_buffered = True

    def build_item(self, text: str, status: str) -> Item:
        item: Item = {"id": self.item_id, "type": "custom_tool_call", "status": status}
        return item | {"call_id": self._call_id, "name": self._tool.name, "input": text}

    def describe_text(self, text: str) -> Item:
        return {"input": text}

    def read_text(self, text: str) -> str:
        try:
            return _decode_free_text(text).input
        except (msgspec.MsgspecError, UnicodeEncodeError, RecursionError):
            return text


def _build_usage(usage: AnswerUsage) -> Item:
    counts: Item = {"input_tokens": usage.prompt_tokens, "output_tokens": usage.output_tokens}
    counts["input_tokens_details"] = {
        "cached_tokens": usage.cached_tokens, "cache_write_tokens": 0,
    }  # fmt: skip
    counts["output_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return counts | {"total_tokens": usage.prompt_tokens + usage.output_tokens}
