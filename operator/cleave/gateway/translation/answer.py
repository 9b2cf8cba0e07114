"""What translates an engine's answer, and the translation of a chat's events. Pure.

Each API implements `Answer`; `proxy.translated_client` calls it. What is hard: a chat event says
only what it adds, while these APIs announce each block of an answer, end it, and count events. So
`StreamTranslator` derives from the events which block is open, and the API writes the blocks.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from cleave.gateway.translation.chat_types import (
    UNTRANSLATABLE,
    AnswerChoice,
    AnswerError,
    AnswerMessage,
    AnswerUsage,
    ChatAnswer,
    FunctionCall,
    ToolCall,
    decode_event,
    decode_last_event,
)

MAX_EVENT_BYTES = 128 << 10
"""Of an event that is translated: it is decoded and written again in one go, 3 ms at most."""
MAX_TEXT_BYTES = 2 << 20
"""Of a stream that is repeated when it ends."""

_SEPARATOR = b"\n\n"
_MAX_SEARCHED = MAX_EVENT_BYTES + len(_SEPARATOR)
_DATA = b"data: "
_DONE = b"data: [DONE]"
_COMMENT = b":"

_ENGINE_ERROR = "server_error", "engine_error"
UNREADABLE = AnswerError("the engine's response cannot be translated", *_ENGINE_ERROR)
"""It is not a chat completion."""
_EVENT_TOO_LONG = AnswerError(
    "an event of the engine's stream is above 256 KiB and is not translated: do not stream, or use "
    "/v1/chat/completions",
    *_ENGINE_ERROR,
)
_ANSWER_TOO_LONG = AnswerError(
    "the answer is above 2 MiB of text, counting each item as 8 KiB: request fewer tokens, or use "
    "/v1/chat/completions",
    *_ENGINE_ERROR,
)
NO_ROOM = AnswerError(
    "the gateway's buffers (--max-buffered) have no room for the texts that this stream repeats at "
    "its end: request it again later, or use /v1/chat/completions",
    *_ENGINE_ERROR,
)


class Answer(Protocol):
    """One answer in a client's API."""

    def build_body(self, body: bytes) -> bytes:
        """The body for the engine's complete response. Raises msgspec.MsgspecError."""

    def build_error(self, status: int, body: bytes) -> bytes:
        """The body of an error response; `body`: in OpenAI's form."""


class StreamedAnswer(Answer, Protocol):
    """An answer that can be streamed: blocks, one after the other. Each method returns events;
    those that may be long, in pieces."""

    @property
    def text_bytes(self) -> int:
        """What it keeps of the texts."""

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

    def close_block(self) -> Sequence[bytes]:
        """The open block is complete."""

    def end(self, choice: AnswerChoice, usage: AnswerUsage) -> Sequence[bytes]:
        """The last events; `choice` has the reasons for the end."""

    def fail(self, error: AnswerError) -> Sequence[bytes]:
        """The last events of an answer that breaks off."""


class StreamTranslator:
    """Translates the events of one chat stream."""

    def __init__(self, answer: StreamedAnswer, count_prompt: Callable[[], int] = int) -> None:
        """`count_prompt`: counts the tokens of the prompt, once the first event has come."""
        self._answer = answer
        self._count_prompt = count_prompt
        self._has_begun = False
        self.has_ended = False
        """Whether the last event was written: nothing follows."""
        self.fault: AnswerError | None = None
        """Why the stream cannot be translated."""
        self._block: str | int | None = None
        """The open block: text, reasoning, or the index of a tool call; None: none is open."""
        self._num_tool_calls = 0
        self._last_choice = AnswerChoice()
        self._usage = AnswerUsage()
        self.text_bytes = 0
        """What the answer keeps of the texts."""
        self._pieces: list[bytes] = []
        """Events for the client."""

    def convert(self, events: bytes) -> list[bytes]:
        """The client's events, in pieces, for complete events of the engine."""
        begin = 0
        try:
            while begin < len(events) and not self.has_ended:
                end = events.find(_SEPARATOR, begin, begin + _MAX_SEARCHED)
                end = len(events) if end < 0 else end
                if end - begin > MAX_EVENT_BYTES:
                    # Before it is copied.
                    self._stop(_EVENT_TOO_LONG)
                elif end > begin:
                    self._convert(events[begin:end])
                begin = end + len(_SEPARATOR)
        except UNTRANSLATABLE:
            self._stop(UNREADABLE)
        self.text_bytes = kept = self._answer.text_bytes
        if kept > MAX_TEXT_BYTES and not self.has_ended:
            self._stop(_ANSWER_TOO_LONG)
        pieces, self._pieces = self._pieces, []
        return pieces

    def fail(self, error: AnswerError) -> list[bytes]:
        """The last events of a stream that cannot go on; nothing if it has ended."""
        if not self.has_ended:
            self._stop(error)
        return self.convert(b"")

    def _convert(self, data: bytes) -> None:
        if data.startswith(_COMMENT):
            self._pieces += data, _SEPARATOR
            return
        if data == _DONE:
            self.has_ended = True
            self._begin(ChatAnswer())
            self._close()
            self._pieces += self._answer.end(self._last_choice, self._usage)
            return
        try:
            event = decode_event(data[len(_DATA) :])
        except msgspec.ValidationError:
            event = decode_last_event(data[len(_DATA) :])
        if event.error is not None:
            self._end_with(event.error)
            return
        self._begin(event)
        if event.usage is not None:
            self._usage = event.usage
        if not event.choices:
            return
        choice = event.choices[0]
        if choice.finish_reason is not None:
            reasons = choice.finish_reason, choice.stop_reason
            self._last_choice = AnswerChoice(finish_reason=reasons[0], stop_reason=reasons[1])
        if choice.delta is not None:
            self._add(choice.delta)

    def _begin(self, event: ChatAnswer) -> None:
        if not self._has_begun:
            self._has_begun = True
            if event.usage is None:
                event.usage = AnswerUsage(prompt_tokens=self._count_prompt())
            self._pieces.append(self._answer.begin(event))

    def _add(self, delta: AnswerMessage) -> None:
        if reasoning := delta.reasoning or delta.reasoning_content:
            if self._block != "reasoning":
                self._close()
                self._pieces.append(self._answer.open_reasoning())
                self._block = "reasoning"
            self._pieces.append(self._answer.add_text(reasoning))
        if delta.content:
            if self._block != "text":
                self._close()
                self._pieces.append(self._answer.open_text())
                self._block = "text"
            self._pieces.append(self._answer.add_text(delta.content))
        for call in delta.tool_calls or ():
            self._add_to_call(call)
            if self.has_ended:
                break

    def _add_to_call(self, call: ToolCall) -> None:
        function = call.function or FunctionCall()
        if self._block != call.index:
            if not function.name:
                # Engines write the calls one after the other; a closed block cannot go on.
                self._stop(UNREADABLE)
                return
            call_id = call.id or f"call_{self._num_tool_calls}"
            self._num_tool_calls += 1
            self._close()
            self._pieces.append(self._answer.open_tool_call(call_id, function.name))
            self._block = call.index
        if function.arguments:
            self._pieces.append(self._answer.add_text(function.arguments))

    def _close(self) -> None:
        if self._block is not None:
            self._block = None
            self._pieces += self._answer.close_block()

    def _stop(self, fault: AnswerError) -> None:
        self.fault = fault
        self._end_with(fault)

    def _end_with(self, error: AnswerError) -> None:
        self.has_ended = True
        self._pieces += self._answer.fail(error)


def build_event(name: str, payload: dict[str, object]) -> bytes:
    """A named event, whose data repeats the name as its type."""
    data = msgspec.json.encode({"type": name, **payload})
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def shorten_id(chat_id: str) -> str:
    """The part of a chat's id that is unique."""
    return chat_id.removeprefix("chatcmpl-")
