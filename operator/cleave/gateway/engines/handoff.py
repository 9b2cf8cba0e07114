"""The KV hand-off in engines' answers: read from prefill, kept from clients. Pure.

An engine accepts the KV of another prompt without a word and then gives wrong tokens, so a hand-off
must come from the very boot that was picked, be of the very request that was sent there, and no
client may ever see one.
"""

import re

import msgspec

from cleave.gateway.completion import ASK_FOR_KV, KV_KEY
from cleave.gateway.engines.answers import (
    Usage,
    decode_blocks,
    decode_counted,
    decode_fields,
    decode_origin,
    decode_prefill,
)
from cleave.router.instance import Target

_KEY = b'"kv_transfer_params"'
_KEY_WITH_VALUE = re.compile(rb'"kv_transfer_params"\s*:')
_USUAL_END = b',"kv_transfer_params":null}'


class HandoffError(Exception):
    """An engine's answer carries a hand-off that must not be used, or leaks one."""


def read_handoff(body: bytes, boot_id: str, request_id: bytes) -> tuple[msgspec.Raw | None, int]:
    """(hand-off, prompt tokens) of a prefill answer; the hand-off is None when there is none.

    None is legitimate: a first token that ends the answer leaves nothing to continue.
    `request_id`: as the engine was told; its own is that with a word before and more behind.
    Raises HandoffError when it is not of this boot and request, or cannot be read.
    """
    try:
        answer = decode_prefill(body)
        origin = decode_origin(answer.kv_transfer_params)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise HandoffError(f"cannot be read: {error}") from None
    tokens = answer.usage.prompt_tokens if answer.usage is not None else 0
    if origin is None:
        return None, tokens
    if not boot_id or origin.remote_engine_id != boot_id:
        raise HandoffError(f"is of boot {origin.remote_engine_id!r}, not of {boot_id!r}")
    # The id between its borders: the first request of a gateway is not its tenth.
    if f"-{request_id.decode()}-" not in f"{origin.remote_request_id}-":
        raise HandoffError("is of another request")
    return answer.kv_transfer_params, tokens


def ask_ahead(name: bytes) -> msgspec.Raw:
    """What a prefill engine is asked, so that another may follow it under this name."""
    return msgspec.Raw(bytes(ASK_FOR_KV)[:-1] + b',"cleave":{"name":"%b"}}' % name)


def promise(prefill: Target, name: bytes) -> msgspec.Raw:
    """The hand-off of a prefill that has not ended: where to follow it, and under which name."""
    own = {
        "boot_id": prefill.boot_id,
        "request_id": name.decode(),
        "epoch": 0,
        "prompt_digest": "",
        "num_tokens": 0,
        "addresses": ((prefill.host, prefill.kv_port),),
    }
    told = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": prefill.boot_id,
        "remote_request_id": name.decode(),
        "remote_host": prefill.host,
        "remote_port": prefill.kv_port,
        "cleave": own,
    }
    return msgspec.Raw(msgspec.json.encode(told))


def count_blocks(body: bytes) -> int:
    """Blocks of KV that a prefill answer hands over; 0 when it does not tell."""
    try:
        handed = decode_blocks(body).kv_transfer_params
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return 0
    return sum(map(len, handed.remote_block_ids or ())) if handed is not None else 0


def strip_handoff(body: bytes) -> bytes:
    """An answer without the hand-off, all other values byte for byte.

    Raises HandoffError when one is left that cannot be taken out.
    """
    count = body.count(_KEY)
    if count == 0:
        return body
    if count == 1 and body.endswith(_USUAL_END) and b"\\u" not in body:
        # As vLLM writes it: the last member of the outermost object. A tenth of the way below.
        return body[: -len(_USUAL_END)] + b"}"
    try:
        fields = decode_fields(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise HandoffError("cannot be taken out of the answer") from None
    fields.pop(KV_KEY, None)
    stripped = msgspec.json.encode(fields)
    if _KEY_WITH_VALUE.search(stripped):
        raise HandoffError("lies deeper in the answer")
    return stripped


def read_usage(body: bytes) -> Usage:
    """Token counts of a whole answer; zeros when it states none."""
    try:
        return decode_counted(body).usage or Usage()
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Usage()


def leaks_handoff(events: bytes) -> bool:
    """Whether whole events of a stream hold a hand-off; text that only speaks of one does not."""
    return _KEY in events and _KEY_WITH_VALUE.search(events) is not None
