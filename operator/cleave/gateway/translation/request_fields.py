"""Reads the fields of requests that are translated; errors name the field. Pure.

Used by `messages_request` and `responses_request`. What is hard: decoding blocks the event loop,
and a hostile body can consist of millions of tiny objects. So bodies have a limit of objects, and
what need not be read, such as schemas and arguments of tools, stays the client's bytes.
"""

from typing import Any, TypeVar

import msgspec

from cleave.gateway.http.completion_request import (
    Body,
    Fields,
    decode_fields,
    scan_fields,
)
from cleave.gateway.http.errors import GatewayError, build_bad_request
from cleave.gateway.http.large_json import MIN_BYTES
from cleave.time_slices import Steps

MAX_OBJECTS = 100_000
"""Limit of the braces in a body, and so of its objects; reading so many takes 0.2 s at most."""

ENGINE_FIELDS = frozenset((
    "allowed_token_ids", "bad_words", "cache_salt", "chat_template_kwargs", "frequency_penalty",
    "ignore_eos", "include_stop_str_in_output", "logit_bias", "min_p", "min_tokens",
    "presence_penalty", "priority", "repetition_penalty", "seed", "session_id",
    "skip_special_tokens", "stop_token_ids", "temperature", "thinking_token_budget", "top_k",
    "top_p", "vllm_xargs", "watermarking",
))  # fmt: skip
"""Fields that mean the same in a chat completion and reach the engine unchanged."""

Chat = dict[str, Any]
"""The fields of a chat completion; values may be `msgspec.Raw`."""

T = TypeVar("T")

_NULL = b"null"

FLAG = msgspec.json.Decoder(bool)
INTEGER = msgspec.json.Decoder(int)
TEXT = msgspec.json.Decoder(str)
TEXTS = msgspec.json.Decoder(list[str])


def read_request(body: Body) -> Steps[Fields]:
    """The fields of a request, those that are null left out. Raises GatewayError (400)."""
    if body.count(b"{") > MAX_OBJECTS:
        message = f"the body has more than {MAX_OBJECTS} objects: shorten the conversation"
        raise build_bad_request(message)
    fields = decode_fields(body) if len(body) <= MIN_BYTES else (yield from scan_fields(body))
    return {name: raw for name, raw in fields.items() if bytes(memoryview(raw)[:4]) != _NULL}


def check_names(fields: Fields, known: frozenset[str], refused: dict[str, str]) -> None:
    """Refuse fields that are unknown, or that cannot be honoured. Raises GatewayError (400).
    `refused`: by name, what to do instead."""
    for name in fields:
        if name in refused:
            raise build_bad_request(f"{name} is not supported: {refused[name]}", name)
        if name not in known and name not in ENGINE_FIELDS:
            message = f"unknown field {name!r}: remove it, or check how it is spelled"
            raise build_bad_request(message, name)


def copy_engine_fields(fields: Fields) -> Chat:
    """The fields that reach the engine unchanged, and `model`, `stream` and its usage."""
    chat: Chat = {name: raw for name, raw in fields.items() if name in ENGINE_FIELDS}
    if "model" in fields:
        chat["model"] = fields["model"]
    if decode_field(fields, "stream", FLAG, False):
        chat["stream"] = True
        chat["stream_options"] = {"include_usage": True}
    return chat


def decode_field(fields: Fields, name: str, decoder: msgspec.json.Decoder[T], default: T) -> T:
    """A field's value, or the default if it is absent. Raises GatewayError (400)."""
    if name not in fields:
        return default
    try:
        return decoder.decode(fields[name])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        fault, _, place = str(error).partition(" - at `$")
        path = name + place.removesuffix("`")
        raise build_bad_request(f"{path}: {fault}", path) from None


def build_unsupported(path: str, value: str, allowed: str) -> GatewayError:
    """400: a value that this gateway does not support."""
    return build_bad_request(f"{path} {value[:80]!r} is not supported: use {allowed}", path)
