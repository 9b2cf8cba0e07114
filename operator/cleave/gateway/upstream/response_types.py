"""The members that the gateway decodes of engines' responses; all others are skipped.

Used by `answers`, `kv_transfer_params` and `stream_start`. A module of its own because these types
cannot be compiled: mypyc erases union types, so msgspec could not read members that have one.
"""

from typing import Annotated, Any

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]


class TokenUsage(msgspec.Struct):
    """Tokens as the engine counts them."""

    prompt_tokens: _Count = 0
    completion_tokens: _Count | None = 0


class UsageResponse(msgspec.Struct):
    """A complete response, decoded for its token counts."""

    usage: TokenUsage | None = None


class CompletionUsage(msgspec.Struct):
    """A complete response of a completion, decoded for its token counts."""

    choices: msgspec.Raw
    """A list. One value for each of its items would take 13 ms for 0.5 MiB of them."""
    usage: TokenUsage | None = None


class PrefillResponse(msgspec.Struct):
    """The response of a prefill engine."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: TokenUsage | None = None


class KvOrigin(msgspec.Struct):
    """The engine and the request that a handoff comes from."""

    remote_engine_id: str | None = None
    remote_request_id: str = ""


class KvBlockIds(msgspec.Struct):
    """The KV blocks of a handoff."""

    remote_block_ids: list[msgspec.Raw] | None = None
    """By group of layers; up to a million numbers, which are counted only."""


class KvBlocksResponse(msgspec.Struct):
    """The response of a prefill engine, decoded for its KV blocks."""

    kv_transfer_params: KvBlockIds | None = None


class CompletionLogprobs(msgspec.Struct):
    """Log-probabilities of a completion, one entry per token."""

    tokens: list[str] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] | None = None


class CompletionChoice(msgspec.Struct):
    """One choice of a completion that was not streamed."""

    text: str = ""
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | None = None


class CompletionResponse(msgspec.Struct):
    """A completion that was not streamed."""

    choices: list[CompletionChoice] = msgspec.field(default_factory=list)
    usage: TokenUsage | None = None


class StreamChoice(msgspec.Struct):
    """One choice in an event of a stream: what grows with its tokens, and its end."""

    index: int = 0
    text: str | None = None
    delta: dict[str, Any] | None = None
    logprobs: dict[str, list[msgspec.Raw] | None] | None = None
    finish_reason: str | None = None


class StreamEvent(msgspec.Struct):
    """An event of a stream."""

    id: msgspec.Raw = msgspec.Raw()
    created: msgspec.Raw = msgspec.Raw()
    model: msgspec.Raw = msgspec.Raw()
    choices: list[StreamChoice] | None = None
    usage: TokenUsage | None = None


class FailureEvent(msgspec.Struct):
    """An event of a stream, decoded for whether it reports an error."""

    error: msgspec.Raw = msgspec.Raw()


class EngineErrorBody(msgspec.Struct):
    """An error as the engine reports it."""

    code: int | str | None = None


class ErrorEvent(msgspec.Struct):
    """An event of a stream that reports an error."""

    error: EngineErrorBody


decode_usage = msgspec.json.Decoder(UsageResponse).decode
decode_completion_usage = msgspec.json.Decoder(CompletionUsage).decode
decode_token_usage = msgspec.json.Decoder(TokenUsage | None).decode
decode_prefill_response = msgspec.json.Decoder(PrefillResponse).decode
decode_kv_origin = msgspec.json.Decoder(KvOrigin | None).decode
decode_kv_blocks = msgspec.json.Decoder(KvBlocksResponse).decode
decode_completion = msgspec.json.Decoder(CompletionResponse).decode
decode_failure = msgspec.json.Decoder(FailureEvent).decode
decode_error_event = msgspec.json.Decoder(ErrorEvent).decode
_decode_stream_event = msgspec.json.Decoder(StreamEvent).decode
_decode_text = msgspec.json.Decoder(str).decode


def decode_stream_event(data: bytes) -> StreamEvent | None:
    """An event's JSON; None: it is no event of a completion."""
    try:
        return _decode_stream_event(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def decode_text(data: bytes) -> str | None:
    """A text of JSON; None: it is none."""
    try:
        return _decode_text(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
