"""Checks that what an engine sent with status 200 is an answer, before a client gets it. Pure.

Used by proxied requests for responses that are not streamed. An engine may be broken, and its port
may belong to another program by now. A large answer is checked at its two ends only, where vLLM
writes everything but the choices: decoding it would stop all other requests.
"""

import json

import msgspec

from cleave.gateway.http.headers import (
    BYTES_TYPE,
    CONTENT_TYPE,
    JSON_TYPE,
    Headers,
    sanitize_header_value,
)
from cleave.gateway.upstream import response_types
from cleave.gateway.upstream.collected_answer import USAGE_KEY, AnswerBody, CollectedAnswer
from cleave.gateway.upstream.response_types import TokenUsage

_END_BYTES = 4 << 10
_MAX_TYPE_BYTES = 64
_CHOICES = b'"choices":['


class NoAnswerError(Exception):
    """It is no answer; the message continues `instance NAME ...`."""


def read_usage(headers: Headers, body: AnswerBody, *, is_completion: bool) -> TokenUsage | None:
    """Token counts of an answer; None when it has none. Raises NoAnswerError."""
    kind = headers.get(CONTENT_TYPE, b"").partition(b";")[0].strip().lower()
    if kind == BYTES_TYPE and body and not is_completion:
        return None
    if kind != JSON_TYPE:
        name = sanitize_header_value(kind[:_MAX_TYPE_BYTES].decode("latin-1")).decode()
        raise NoAnswerError(f"sent {name or 'no content type'} instead of {JSON_TYPE.decode()}")
    if not body:
        raise NoAnswerError("sent an empty answer")
    try:
        if isinstance(body, CollectedAnswer):
            return _read_ends(body, is_completion)
        if is_completion:
            completion = response_types.decode_completion_usage(body)
            if not bytes(completion.choices).startswith(b"["):
                raise ValueError("its choices are no list")
            counts: TokenUsage | None = completion.usage
            return counts
        usage: TokenUsage | None = response_types.decode_usage(body).usage
        return usage
    except (msgspec.MsgspecError, ValueError, RecursionError):
        what = "a completion" if is_completion else "an object"
        raise NoAnswerError(f"sent an answer that is not the JSON of {what}") from None


def parse_usage(data: bytes) -> TokenUsage | None:
    """Token counts in an event of a stream; None: it has none."""
    try:
        usage: TokenUsage | None = response_types.decode_token_usage(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return usage


def _read_ends(answer: CollectedAnswer, is_completion: bool) -> TokenUsage | None:
    """As `read_usage`, of a large answer. Raises ValueError."""
    size = len(answer)
    start, end = answer.read(0, _END_BYTES).lstrip(), answer.read(size - _END_BYTES, size).rstrip()
    if start[:1] != b"{" or end[-1:] != b"}" or (is_completion and _CHOICES not in start):
        raise ValueError("one of its ends is missing")
    # Log-probabilities and ids of the prompt may follow.
    if answer.usage_at < 0:
        if is_completion:
            raise ValueError("it has no usage")
        return None
    at = answer.usage_at + len(USAGE_KEY) - 1
    text = answer.read(at, at + _END_BYTES).decode(errors="replace")
    usage, length = json.JSONDecoder().raw_decode(text)
    if not text[length:].strip():
        raise ValueError("it ends with its usage")
    return msgspec.convert(usage, TokenUsage)
