"""What the gateway decodes of engines' answers: a few members, all others are passed over.

Used by `handoff` and `opening`. A module of its own because these types cannot be compiled: of a
member that may have one of two types the compiler leaves nothing that msgspec could read.
"""

import msgspec


class Usage(msgspec.Struct):
    """Tokens as the engine counts them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class Counted(msgspec.Struct):
    """A whole answer, for its counts."""

    usage: Usage | None = None


class PrefillAnswer(msgspec.Struct):
    """What a prefill engine says."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    usage: Usage | None = None


class Origin(msgspec.Struct):
    """Whose a hand-off is."""

    remote_engine_id: str | None = None
    remote_request_id: str = ""


class Blocks(msgspec.Struct):
    """What a hand-off names."""

    remote_block_ids: list[list[int]] | None = None


class BlocksAnswer(msgspec.Struct):
    """A prefill engine's answer, for its blocks."""

    kv_transfer_params: Blocks | None = None


class Error(msgspec.Struct):
    """What an engine calls its failure."""

    code: int | str | None = None


class ErrorEvent(msgspec.Struct):
    """A failure in the place of an event."""

    error: Error


decode_counted = msgspec.json.Decoder(Counted).decode
decode_prefill = msgspec.json.Decoder(PrefillAnswer).decode
decode_origin = msgspec.json.Decoder(Origin | None).decode
decode_blocks = msgspec.json.Decoder(BlocksAnswer).decode
decode_error = msgspec.json.Decoder(ErrorEvent).decode
decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
