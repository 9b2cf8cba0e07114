"""What translates an engine's answer, and the translation of a chat's events. Pure.

Each API implements `Answer`; `proxy.translated_client` calls it. What is hard: a chat event says
only what it adds, while these APIs announce each block of an answer, end it, and count events. So
`StreamTranslator` derives from the events which block is open, and the API writes the blocks.
"""

from collections.abc import Callable
from typing import Protocol

import msgspec

from cleave.gateway.translation.chat_types import (
    AnswerChoice,
    AnswerError,
    AnswerMessage,
    AnswerUsage,
    ChatAnswer,
    FunctionCall,
    ToolCall,
    decode_chat,
)

_SEPARATOR = b"\n\n"
_DATA = b"data: "
_DONE = b"data: [DONE]"
_COMMENT = b":"

UNREADABLE = AnswerError(
    "the engine's response cannot be translated", "server_error", "engine_error"
)
"""It is not a chat completion."""


class Answer(Protocol):
    """One answer in a client's API."""

    def build_body(self, body: bytes) -> bytes:
        """The body for the engine's complete response. Raises msgspec.MsgspecError."""

    def build_error(self, status: int, body: bytes) -> bytes:
        """The body of an error response; `body`: in OpenAI's form."""


class StreamedAnswer(Answer, Protocol):
    """An answer that can be streamed: blocks, one after the other. Each method returns events."""

    def begin(self, event: ChatAnswer) -> bytes:
        """The first events; `event` is the engine's first."""

    def open_text(self) -> bytes:
        """A block of text begins."""

    def open_reasoning(self) -> bytes:
        """A block of reasoning begins."""

    def open_tool_call(self, call_id: str, name: str) -> bytes:
        """A tool call begins, whose arguments are its text."""

    def add_text(self, text: str) -> bytes:
        """More text of the open block."""

    def close_block(self) -> bytes:
        """The open block is complete."""

    def end(self, choice: AnswerChoice, usage: AnswerUsage) -> bytes:
        """The last events; `choice` has the reasons for the end."""

    def fail(self, error: AnswerError) -> bytes:
        """The last events of an answer that breaks off."""


class StreamTranslator:
    """Translates the events of one chat stream."""

    def __init__(self, answer: StreamedAnswer, count_prompt: Callable[[], int]) -> None:
        """`count_prompt`: counts the tokens of the prompt, once the first event has come."""
        self._answer = answer
        self._count_prompt = count_prompt
        self._has_begun = self._has_ended = False
        self._block: str | int | None = None
        """The open block: text, reasoning, or the index of a tool call; None: none is open."""
        self._num_tool_calls = 0
        self._last_choice = AnswerChoice()
        self._usage = AnswerUsage()

    def convert(self, events: bytes) -> bytes:
        """The client's events for complete events of the engine."""
        return b"".join([self._convert(each) for each in events.split(_SEPARATOR) if each])

    def _convert(self, data: bytes) -> bytes:
        if self._has_ended:
            return b""
        if data.startswith(_COMMENT):
            return data + _SEPARATOR
        if data == _DONE:
            self._has_ended = True
            first = self._begin(ChatAnswer())
            return first + self._close() + self._answer.end(self._last_choice, self._usage)
        try:
            event = decode_chat(data[len(_DATA) :])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return self._fail(UNREADABLE)
        if event.error is not None:
            return self._fail(event.error)
        first = self._begin(event)
        if event.usage is not None:
            self._usage = event.usage
        if not event.choices:
            return first
        choice = event.choices[0]
        if choice.finish_reason is not None:
            self._last_choice = choice
        return first + (self._add(choice.delta) if choice.delta is not None else b"")

    def _begin(self, event: ChatAnswer) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        if event.usage is None:
            event.usage = AnswerUsage(prompt_tokens=self._count_prompt())
        return self._answer.begin(event)

    def _add(self, delta: AnswerMessage) -> bytes:
        events = b""
        if reasoning := delta.reasoning or delta.reasoning_content:
            if self._block != "reasoning":
                events = self._close() + self._answer.open_reasoning()
                self._block = "reasoning"
            events += self._answer.add_text(reasoning)
        if delta.content:
            if self._block != "text":
                events += self._close() + self._answer.open_text()
                self._block = "text"
            events += self._answer.add_text(delta.content)
        for call in delta.tool_calls or ():
            events += self._add_to_call(call)
            if self._has_ended:
                break
        return events

    def _add_to_call(self, call: ToolCall) -> bytes:
        function = call.function or FunctionCall()
        events = b""
        if self._block != call.index:
            if not function.name:
                # Engines write the calls one after the other; a closed block cannot go on.
                return self._fail(UNREADABLE)
            call_id = call.id or f"call_{self._num_tool_calls}"
            self._num_tool_calls += 1
            events = self._close() + self._answer.open_tool_call(call_id, function.name)
            self._block = call.index
        return events + (self._answer.add_text(function.arguments) if function.arguments else b"")

    def _close(self) -> bytes:
        is_open, self._block = self._block is not None, None
        return self._answer.close_block() if is_open else b""

    def _fail(self, error: AnswerError) -> bytes:
        self._has_ended = True
        return self._answer.fail(error)


def build_event(name: str, payload: dict[str, object]) -> bytes:
    """A named event, whose data repeats the name as its type."""
    data = msgspec.json.encode({"type": name, **payload})
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def shorten_id(chat_id: str) -> str:
    """The part of a chat's id that is unique."""
    return chat_id.removeprefix("chatcmpl-")
