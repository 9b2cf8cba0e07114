"""The KV handoff (`kv_transfer_params`) in responses: read from prefill, hidden from clients. Pure.

An engine accepts the KV of another prompt without an error and then generates wrong tokens. So a
handoff must come from the boot that was picked and belong to the request that was sent there, and
no client may ever receive one.
"""

import re

import msgspec

from cleave.gateway.http.bounded_json import TooManyMembersError, decode_bounded_object
from cleave.gateway.http.completion_request import KV_PARAMS_KEY, KV_REQUEST_PARAMS
from cleave.gateway.upstream import response_types
from cleave.gateway.upstream.collected_answer import (
    HANDOFF_KEY,
    AnswerBody,
    CollectedAnswer,
    Pieces,
)
from cleave.gateway.upstream.spellings import MAX_ESCAPED_BYTES, SpellingError, decode_letters
from cleave.router.instance import Target

MAX_MEMBERS = 128
"""Of an answer from which a handoff is taken out; vLLM's have about a dozen."""
_KEY_WITH_VALUE = re.compile(rb'"kv_transfer_params"\s*:')
_ORIGIN = b"remote_engine_id"
_USUAL_END = b',"kv_transfer_params":null}'
"""As vLLM writes it when there is none."""
_NULL_MEMBERS = (_USUAL_END, _USUAL_END[:-1] + b",")


class HandoffError(Exception):
    """A response contains a handoff that must not be used, or would leak one to the client."""


def read_handoff(body: bytes, boot_id: str, request_id: bytes) -> tuple[msgspec.Raw | None, int]:
    """(handoff, prompt tokens) of a prefill response; the handoff is None when there is none.

    None is legitimate: if the first token ends the response, nothing is left to decode.
    `request_id`: the id sent to the engine, which adds a prefix and a suffix. Raises HandoffError
    when the handoff is of another boot or request, or cannot be read.
    """
    try:
        response = response_types.decode_prefill_response(body)
        origin = response_types.decode_kv_origin(response.kv_transfer_params)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise HandoffError(f"cannot be read: {error}") from None
    tokens = response.usage.prompt_tokens if response.usage is not None else 0
    if origin is None:
        return None, tokens
    if not boot_id or origin.remote_engine_id != boot_id:
        raise HandoffError(f"is of boot {origin.remote_engine_id!r}, not of {boot_id!r}")
    # With separators, because the id of a gateway's first request is a prefix of its tenth's.
    if f"-{request_id.decode()}-" not in f"{origin.remote_request_id}-":
        raise HandoffError("is of another request")
    return response.kv_transfer_params, tokens


def build_prefix_source_params(source: Target) -> msgspec.Raw:
    """`kv_transfer_params` for a prefill engine that is to pull the beginning of the prompt from
    the prefix cache of another engine."""
    place: dict[str, object] = {"engine_id": source.boot_id, "host": source.host}
    place["port"] = source.prefix_port
    if source.kv_key:
        place["key"] = source.kv_key
    return msgspec.Raw(
        bytes(KV_REQUEST_PARAMS)[:-1] + b',"prefix_source":%b}' % msgspec.json.encode(place)
    )


def build_overlapped_prefill_params(name: bytes) -> msgspec.Raw:
    """`kv_transfer_params` for a prefill engine whose KV is pulled by name while it is computed."""
    return msgspec.Raw(bytes(KV_REQUEST_PARAMS)[:-1] + b',"cleave":{"name":"%b"}}' % name)


def build_pending_handoff(prefill: Target, name: bytes) -> msgspec.Raw:
    """The handoff of a prefill that is still running: where to pull its KV, under which name."""
    extension: dict[str, object] = {
        "boot_id": prefill.boot_id,
        "request_id": name.decode(),
        "epoch": 0,
        "prompt_digest": "",
        "num_tokens": 0,
        "addresses": ((prefill.host, prefill.kv_port),),
    }
    if prefill.kv_key:
        extension["key"] = prefill.kv_key
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": prefill.boot_id,
        "remote_request_id": name.decode(),
        "remote_host": prefill.host,
        "remote_port": prefill.kv_port,
        "cleave": extension,
    }
    return msgspec.Raw(msgspec.json.encode(params))


def count_blocks(body: bytes) -> int:
    """KV blocks that a prefill response hands over; 0 when it does not say."""
    try:
        blocks = response_types.decode_kv_blocks(body).kv_transfer_params
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return 0
    groups = map(bytes, (blocks.remote_block_ids if blocks is not None else None) or ())
    return sum(group.count(b",") + bool(group.strip(b"[] ")) for group in groups)


def strip_handoff(body: bytes) -> bytes:
    """The response without the handoff, all other values byte for byte.
    Raises HandoffError when a handoff remains that cannot be removed."""
    # In a longer answer escapes were found while it was collected.
    plain = decode_letters(body) if len(body) <= MAX_ESCAPED_BYTES else body
    count = plain.count(HANDOFF_KEY)
    if count == 0:
        return body
    body = plain
    if count == 1 and body.endswith(_USUAL_END):
        # As vLLM writes it: the last member of the outermost object. Ten times faster.
        return body[: -len(_USUAL_END)] + b"}"
    try:
        fields = decode_bounded_object(body, MAX_MEMBERS)
    except (TooManyMembersError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise HandoffError("cannot be taken out of the answer") from None
    fields.pop(KV_PARAMS_KEY, None)
    stripped = msgspec.json.encode(fields)
    if _KEY_WITH_VALUE.search(stripped):
        raise HandoffError("lies deeper in the answer")
    return stripped


def strip_answer(body: AnswerBody) -> Pieces:
    """As `strip_handoff`, in pieces; of a large answer only an empty handoff can be removed."""
    return [strip_handoff(body)] if isinstance(body, bytes) else _strip_large(body)


def _strip_large(answer: CollectedAnswer) -> Pieces:
    at, size = answer.handoff_at - 1, len(answer)
    if answer.has_escaped_key:
        raise HandoffError("is written as no engine does")
    if not answer.num_handoffs:
        return answer.slice(0, size)
    end = at + len(_USUAL_END) - 1
    is_empty = at >= 0 and answer.read(at, end + 1) in _NULL_MEMBERS
    if answer.num_handoffs > 1 or not is_empty:
        raise HandoffError("cannot be taken out of a large answer")
    return answer.slice(0, at) + answer.slice(end, size)


def contains_handoff(events: bytes) -> bool:
    """Whether complete events contain a handoff; text that merely mentions one does not count."""
    return HANDOFF_KEY in events and _KEY_WITH_VALUE.search(events) is not None


def contains_origin(error: bytes) -> bool:
    """Whether an engine's error quotes a handoff, or may quote one."""
    try:
        return _ORIGIN in decode_letters(error)
    except SpellingError:
        return True
