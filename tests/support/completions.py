"""Requests read at once, and the bodies that engines get, as one text."""

import msgspec

from cleave.gateway.http import completion_request
from cleave.gateway.http.completion_request import (
    KV_REQUEST_PARAMS,
    CompletionRequest,
    Fields,
    build_decode_fields,
    build_prefill_fields,
    encode_fields,
)
from cleave.time_slices import run_at_once


def parse_completion(path: bytes, body: bytes) -> CompletionRequest:
    return run_at_once(completion_request.parse_completion(path, body))


def parse_engine_request(path: bytes, body: bytes, fallback: str) -> CompletionRequest:
    return run_at_once(completion_request.parse_engine_request(path, body, lambda: fallback))


def encode(fields: Fields) -> bytes:
    return b"".join(encode_fields(fields))


def build_colocated_body(completion: CompletionRequest) -> bytes:
    return encode(completion.fields)


def build_prefill_body(
    completion: CompletionRequest, kv_params: msgspec.Raw = KV_REQUEST_PARAMS
) -> bytes:
    return encode(build_prefill_fields(completion, kv_params))


def build_decode_body(completion: CompletionRequest, handoff: msgspec.Raw) -> bytes:
    return encode(build_decode_fields(completion, handoff))
