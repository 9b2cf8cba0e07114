"""No body makes engines read what gateways did not: both parsers get the same bytes.

`FUZZ_INPUTS=1000000` tries so many; the seed of a failure is in its message. Engines read JSON as
vLLM's API server does: `json.loads` of the body, then the request class of the path.
"""

import json
import os
import re
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.gateway.http import completion_request, large_json
from cleave.gateway.http.completion_request import CompletionRequest
from cleave.gateway.http.engine_fields import RESERVED_ARGUMENTS, TABLES
from cleave.gateway.http.errors import GatewayError
from cleave.gateway.translation.request_fields import ModelFacts
from cleave.gateway.translation.translations import TRANSLATORS
from cleave.time_slices import run_at_once

from tests.support.completions import (
    build_colocated_body,
    build_prefill_body,
    parse_completion,
    parse_engine_request,
)
from tests.support.json_traps import BodyGenerator

NUM_INPUTS = int(os.environ.get("FUZZ_INPUTS", "4000"))
CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"
PATHS = (CHAT, COMPLETIONS, b"/v1/embeddings", b"/pooling", b"/score", b"/rerank", b"/tokenize")

Outcome = tuple[CompletionRequest, bytes] | None
"""The request and the path of the engine; None: refused."""


def read_at_once(path: bytes, body: bytes) -> Outcome:
    return read(path, body)


def read_in_slices(path: bytes, body: bytes) -> Outcome:
    """As if the body were large. Slices are short, so that they end at each place of a body."""
    before = completion_request.MIN_BYTES, large_json.SLICE_BYTES
    completion_request.MIN_BYTES, large_json.SLICE_BYTES = 0, 29
    try:
        return read(path, body)
    finally:
        completion_request.MIN_BYTES, large_json.SLICE_BYTES = before


def read(path: bytes, body: bytes) -> Outcome:
    try:
        if translate := TRANSLATORS.get(path):
            translation = run_at_once(translate(body, ModelFacts()))
            return translation.completion, translation.path
        if path in (CHAT, COMPLETIONS):
            return parse_completion(path, body), path
        return parse_engine_request(path, body, "m"), path
    except GatewayError as error:
        if error.status != 400:
            raise
        return None


def refuse_constant(name: str) -> float:
    raise AssertionError(f"{name} reaches the engine")


def read_as_engine(body: bytes) -> dict | None:
    """None: the engine refuses the body."""
    try:
        return json.loads(body, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return None


def iterate_parts(value: object, is_part: bool = False) -> Iterator[dict]:
    """What may be a part of a message, a medium: objects in lists that are members of objects."""
    if isinstance(value, dict):
        if is_part:
            yield value
        for inner in value.values():
            yield from iterate_parts(inner, is_part or isinstance(inner, list))
    elif isinstance(value, list):
        for inner in value:
            yield from iterate_parts(inner, is_part)


def check(path: bytes, body: bytes, read_it: Callable[[bytes, bytes], Outcome]) -> dict | None:
    """Check what an engine sees of a client's body; None: nothing, one of both refuses it."""
    outcome = read_it(path, body)
    if outcome is None:
        return None
    completion, engine_path = outcome
    table = TABLES[engine_path]
    seen = read_as_engine(build_colocated_body(completion))
    if seen is None:
        assert read_it is read_in_slices or has_long_number(body), "it was read to its end"
        return None
    assert seen.keys() <= table.plain | table.checked
    assert seen.keys() == completion.fields.keys()
    for name, raw in completion.fields.items():
        assert repr(seen[name]) == repr(json.loads(bytes(raw))), name
    arguments = seen.get("vllm_xargs", {})
    assert isinstance(arguments, dict)
    assert RESERVED_ARGUMENTS.isdisjoint(arguments)
    for argument in arguments.values():
        for scalar in argument if isinstance(argument, list) else (argument,):
            assert isinstance(scalar, str | int | float)
    for name in table.prompts:
        assert all("uuid" not in part for part in iterate_parts(seen.get(name)))
    # Raises UnicodeEncodeError where a surrogate has no other half.
    json.dumps(seen, ensure_ascii=False).encode()
    prefill = json.loads(build_prefill_body(completion))
    assert prefill["kv_transfer_params"]["remote_engine_id"] is None
    assert "ec_transfer_params" not in prefill
    if path not in TRANSLATORS:
        check_meaning(body, seen, table.plain, read_it is read_at_once)
    return seen


def check_meaning(body: bytes, seen: dict, plain: frozenset[str], is_strict: bool) -> None:
    """What a client sent is what engines get, by the parser of engines. In slices a body is also
    read that is malformed in a field that is removed."""
    try:
        sent = json.loads(body)
    except ValueError:
        assert not is_strict or has_long_number(body)
        return
    for name in plain - {"model", "return_token_ids"}:
        assert repr(seen.get(name)) == repr(sent.get(name)), name


def has_long_number(body: bytes) -> bool:
    """Python converts no more than 4,300 digits."""
    return re.search(rb"[0-9]{4301}", body) is not None


@pytest.mark.interpreted
@pytest.mark.parametrize("read_it", [read_at_once, read_in_slices])
@pytest.mark.parametrize("seed", range(2))
def test_no_body_shows_engines_what_gateways_did_not_read(read_it, seed: int) -> None:
    bodies = BodyGenerator(seed)
    counts = {"read": 0, "refused": 0}
    for number in range(NUM_INPUTS // 4):
        body, path = bodies.build_body(), (*PATHS, *TRANSLATORS)[number % 10]
        try:
            seen = check(path, body, read_it)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}, body {number}: {path!r} {body!r}") from error
        counts["read" if seen is not None else "refused"] += 1
    assert min(counts.values()) > NUM_INPUTS // 4 // 20, "the bodies try both"


PIECES = st.sampled_from(
    [
        b'{"model":"m"', b',"prompt":', b',"messages":[{"role":"user","content":',
        b',"vllm_xargs":{', b'"kv_transfer_params":', b',"kv_\\u0074ransfer_params":', b'"uuid":',
        b'"x":', b"{", b"}",
        b"[", b"]", b",", b'"a"', b"1", b"NaN", b"-Infinity", b'"\\ud800"', b'"\xed\xa0\x80"',
        b'"\\ud83d', b"\\ude00\"", b'"\\\\', b'"', b"\\", b" ", b"\xff", b"null", b"1e999", b":",
        b',"n":', b',"ec_transfer_params":', b"\x00", b"\xef\xbb\xbf", b'"uuid"',
    ]
)  # fmt: skip


@pytest.mark.interpreted
@settings(max_examples=600, deadline=None)
@given(parts=st.lists(PIECES, max_size=14), at_once=st.booleans())
def test_no_pieces_of_bodies_do_either(parts, at_once) -> None:
    body = b'{"model":"m"' + b"".join(parts)
    for path in (CHAT, COMPLETIONS, b"/v1/embeddings"):
        check(path, body, read_at_once if at_once else read_in_slices)


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.interpreted
@pytest.mark.filterwarnings("ignore")
def test_the_classes_of_vllm_find_no_transfer_parameters() -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest as TextRequest

    bodies, validated = BodyGenerator(7), 0
    for number in range(NUM_INPUTS):
        body, is_chat = bodies.build_body(), bool(number % 2)
        read_it = read_at_once if number % 4 < 2 else read_in_slices
        seen = check(CHAT if is_chat else COMPLETIONS, body, read_it)
        if seen is None:
            continue
        kind = ChatCompletionRequest if is_chat else TextRequest
        try:
            request = kind(**seen)
            parameters = request.to_sampling_params(8, {})
        except Exception:  # noqa: BLE001 - the engine refuses it, with any of its errors
            continue
        validated += 1
        assert request.kv_transfer_params is request.ec_transfer_params is None
        assert not request.model_extra.keys() - {"service_tier"}
        assert RESERVED_ARGUMENTS.isdisjoint(parameters.extra_args or {})
        assert "request_id" not in request.model_fields_set
    assert validated > NUM_INPUTS // 100
