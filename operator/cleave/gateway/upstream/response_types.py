"""The members that the gateway decodes of engines' responses; all others are skipped.

Used by `kv_transfer_params` and `stream_start`. A module of its own because these types cannot be
compiled: mypyc erases union types, so msgspec could not read members that have one.
"""

import msgspec


class Usage(msgspec.Struct):
    """Tokens as the engine counts them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class Counted(msgspec.Struct):
    """A complete response, decoded for its token counts."""

    usage: Usage | None = None


class PrefillAnswer(msgspec.Struct):
    """The response of a prefill engine."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: Usage | None = None


class Origin(msgspec.Struct):
    """The engine and the request that a handoff comes from."""

    remote_engine_id: str | None = None
    remote_request_id: str = ""


class Blocks(msgspec.Struct):
    """The KV blocks of a handoff."""

    remote_block_ids: list[list[int]] | None = None


class BlocksAnswer(msgspec.Struct):
    """The response of a prefill engine, decoded for its KV blocks."""

    kv_transfer_params: Blocks | None = None


class Error(msgspec.Struct):
    """An error as the engine reports it."""

    code: int | str | None = None


class ErrorEvent(msgspec.Struct):
    """An event of a stream that reports an error."""

    error: Error


decode_counted = msgspec.json.Decoder(Counted).decode
decode_prefill = msgspec.json.Decoder(PrefillAnswer).decode
decode_origin = msgspec.json.Decoder(Origin | None).decode
decode_blocks = msgspec.json.Decoder(BlocksAnswer).decode
decode_error = msgspec.json.Decoder(ErrorEvent).decode
decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
