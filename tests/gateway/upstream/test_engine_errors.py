"""Errors of engines in all their forms become OpenAI's."""

import json

import pytest

from cleave.gateway.upstream.engine_errors import (
    MAX_DECODED_BYTES,
    MAX_MESSAGE_CHARACTERS,
    MAX_VALUE_BYTES,
    convert_engine_error,
    convert_error_event,
    is_rejection,
)

REFUSED = "invalid_request_error"


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        pytest.param(
            400,
            {"error": {"message": "no", "type": "BadRequestError", "param": None, "code": 400}},
            ("no", REFUSED, None, None),
            id="vllm",
        ),
        pytest.param(
            404,
            {"error": {"message": "no", "type": "NotFoundError", "param": "model", "code": 404}},
            ("no", REFUSED, "model", "model_not_found"),
            id="vllm's unknown adapter",
        ),
        pytest.param(
            400,
            {"object": "error", "message": "no", "type": "BadRequestError", "code": 400},
            ("no", REFUSED, None, None),
            id="vllm before 0.10",
        ),
        pytest.param(
            422,
            {"detail": [{"loc": ["body", "stop"], "msg": "must be text"}, {"msg": "no"}]},
            ("body.stop: must be text; no", REFUSED, None, None),
            id="fastapi's faults",
        ),
        pytest.param(413, {"detail": "large"}, ("large", REFUSED, None, None), id="fastapi's text"),
        pytest.param(
            400,
            {"error": {"message": "no", "type": "policy_error", "param": "stop", "code": "late"}},
            ("no", "policy_error", "stop", "late"),
            id="openai's stays",
        ),
        pytest.param(400, {"error": "no"}, ("no", REFUSED, None, None), id="a text for an error"),
        pytest.param(
            429, {"error": {"message": "busy"}}, ("busy", "rate_limit_error", None, None), id="429"
        ),
        pytest.param(400, b"<h1>no</h1>", ("<h1>no</h1>", REFUSED, None, None), id="no JSON"),
        pytest.param(400, [1], ("[1]", REFUSED, None, None), id="no object"),
        pytest.param(
            499,
            b"",
            ("the engine refused the request with status 499", REFUSED, None, None),
            id="-",
        ),
    ],
)
def test_an_error_has_openais_form(status: int, body: object, expected: tuple) -> None:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    error = json.loads(convert_engine_error(status, raw).to_json())["error"]
    assert error == dict(zip(("message", "type", "param", "code"), expected, strict=True))


def test_a_message_that_quotes_a_long_request_is_cut() -> None:
    error = convert_engine_error(400, json.dumps({"detail": "x" * 1_000_000}).encode())
    assert len(error.message) < MAX_MESSAGE_CHARACTERS + 10


def test_deep_nesting_is_no_trap() -> None:
    assert convert_engine_error(400, b"[" * 100_000).type == REFUSED


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}),
        (201, {"id": 1}),
    ],
)
def test_what_is_no_error_of_openais_apis_is_relayed_as_it_is(status: int, body: dict) -> None:
    assert convert_engine_error(status, json.dumps(body).encode()) is None


def test_an_error_event_of_a_stream_has_the_same_form() -> None:
    event = b'data: {"error": {"message": "no", "type": "BadRequestError", "code": 400}}'
    error = json.loads(convert_error_event(event).removeprefix(b"data: "))["error"]
    assert error == {"message": "no", "type": REFUSED, "param": None, "code": None}


@pytest.mark.parametrize("length", [MAX_VALUE_BYTES, MAX_DECODED_BYTES - 100, 1 << 20])
@pytest.mark.parametrize("kind", ["text", "list", "error"])
def test_of_an_error_that_quotes_a_whole_request_the_beginning_is_shown(length, kind) -> None:
    quoted = {"text": "x" * length, "list": ["x"] * (length // 5), "error": {"a": "x" * length}}
    error = {"message": quoted[kind], "code": 400, "param": "prompt"}
    body = json.dumps({"error": error}).encode()
    assert is_rejection(body)
    converted = convert_engine_error(400, body)
    assert converted.status == 400
    assert converted.message.count("x") > MAX_MESSAGE_CHARACTERS // 6
    assert len(converted.message) <= MAX_MESSAGE_CHARACTERS + 4
    assert (converted.param == "prompt") == (len(body) <= MAX_DECODED_BYTES)


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"a":', b"<html>", b"x" * (1 << 20)])
def test_what_is_no_object_is_no_error_of_an_engine(body: bytes) -> None:
    assert not is_rejection(body)
