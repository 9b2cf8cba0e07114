"""The members that translations decode of engines' chat completions; all others are skipped.

Responses and events have what their types require, so decoding what is nothing of the kind ends
soon. Not compiled: mypyc erases union types, so msgspec could not read members that have one.
"""

from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec

MAX_TOOL_CALLS = 512
"""Of a complete response. Translating one takes 4 us."""
MAX_EVENT_CALLS = 128
"""Of an event, in which each may begin and end a block: 25 us."""

Short = Annotated[str, msgspec.Meta(max_length=4_096)]
"""Kept until a stream ends."""
UNTRANSLATABLE = (msgspec.MsgspecError, UnicodeError, RecursionError)
"""What decoding raises, and encoding what was decoded."""


class FunctionCall(msgspec.Struct, gc=False):
    """A call of a function, or a part of it."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, gc=False):
    """A tool call, or a part of it."""

    index: int = 0
    id: str | None = None
    function: FunctionCall | None = None


class AnswerMessage(msgspec.Struct):
    """The message of a response, or what an event adds to it."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """What engines before vLLM 0.32 write instead of `reasoning`."""
    tool_calls: Sequence[ToolCall] | None = None


class AnswerChoice(msgspec.Struct):
    """The only choice: translated requests never have several."""

    delta: AnswerMessage | None = None
    """In events."""
    message: AnswerMessage | None = None
    """In complete responses."""
    finish_reason: Short | None = None
    stop_reason: int | Short | None = None
    """vLLM: the stop string that ended the text, or the id of a stop token."""


class PromptTokenDetails(msgspec.Struct):
    """Of the tokens of the prompt."""

    cached_tokens: int | None = None


class OutputTokenDetails(msgspec.Struct):
    """Of the tokens of the output."""

    reasoning_tokens: int | None = None


class AnswerUsage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptTokenDetails | None = None
    completion_tokens_details: OutputTokenDetails | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens of the output, reasoning included."""
        return self.completion_tokens or 0

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt whose KV was cached; 0 also if the engine does not report it."""
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning; 0 also if the engine does not report it."""
        details = self.completion_tokens_details
        return (details.reasoning_tokens or 0) if details is not None else 0


class AnswerError(msgspec.Struct):
    """An error in OpenAI's form, as the gateway writes all of them."""

    message: str = ""
    type: str = ""
    code: str | None = None
    param: str | None = None


class ChatAnswer(msgspec.Struct):
    """A complete response, or an event of a stream."""

    id: Short = ""
    created: int = 0
    model: Short = ""
    choices: Sequence[AnswerChoice] = ()
    usage: AnswerUsage | None = None
    error: AnswerError | None = None


class CompleteFunction(FunctionCall, kw_only=True, gc=False):
    """A call of a function."""

    name: str


class CompleteCall(ToolCall, kw_only=True, gc=False):
    """A tool call."""

    function: CompleteFunction


class CompleteMessage(AnswerMessage):
    """The message of a complete response."""

    tool_calls: (
        Annotated[Sequence[CompleteCall], msgspec.Meta(max_length=MAX_TOOL_CALLS)] | None
    ) = None


class CompleteChoice(AnswerChoice):
    """The choice of a complete response."""

    message: CompleteMessage | None = None


class CompleteAnswer(ChatAnswer):
    """A complete response."""

    choices: tuple[CompleteChoice] = msgspec.field(default=())  # type: ignore[assignment]


class EventCall(ToolCall, kw_only=True, gc=False):
    """A part of a tool call."""

    index: int


class EventMessage(AnswerMessage):
    """What an event adds to the message."""

    tool_calls: Annotated[Sequence[EventCall], msgspec.Meta(max_length=MAX_EVENT_CALLS)] | None = (
        None
    )


class EventChoice(AnswerChoice):
    """The choice of an event."""

    delta: EventMessage | None = None


class EventAnswer(ChatAnswer):
    """An event of a stream."""

    choices: tuple[EventChoice] = msgspec.field(default=())  # type: ignore[assignment]


class LastEvent(ChatAnswer):
    """An event without a choice, which reports usage."""

    choices: tuple[()] = ()


class ErrorAnswer(msgspec.Struct):
    """An error response."""

    error: AnswerError = msgspec.field(default_factory=AnswerError)


class TokenizeResponse(msgspec.Struct):
    """The response of /tokenize."""

    count: int


decode_event: Callable[[bytes], ChatAnswer] = msgspec.json.Decoder(EventAnswer).decode
decode_last_event: Callable[[bytes], ChatAnswer] = msgspec.json.Decoder(LastEvent).decode
decode_error = msgspec.json.Decoder(ErrorAnswer).decode
decode_complete: Callable[[bytes], ChatAnswer] = msgspec.json.Decoder(CompleteAnswer).decode
decode_tokenize = msgspec.json.Decoder(TokenizeResponse).decode
