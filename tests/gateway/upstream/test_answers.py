"""What counts as an engine's answer: usual ones do, and nothing else, whatever bytes come."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.upstream.answers import NoAnswerError, read_usage
from cleave.gateway.upstream.collected_answer import MAX_DECODED_BYTES, CollectedAnswer

JSON = {b"content-type": b"application/json"}
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
USUAL = {"id": "c", "choices": [{"text": "one"}], "usage": USAGE, "system_fingerprint": None}


def encode(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def read(body: bytes, is_completion: bool = True) -> tuple[int, int]:
    collected = CollectedAnswer(body).take()
    usage = read_usage(JSON, collected, is_completion=is_completion)
    return usage.prompt_tokens, usage.completion_tokens or 0


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
def test_a_usual_answer_has_its_counts(kind: str) -> None:
    headers = {b"content-type": kind.encode()}
    assert read_usage(headers, encode(USUAL), is_completion=True).prompt_tokens == 7


@pytest.mark.parametrize("usage", [None, {}, {"x": 1}])
def test_there_are_no_counts_when_none_are_given(usage: object) -> None:
    found = read_usage(JSON, encode(USUAL | {"usage": usage}), is_completion=True)
    assert (found is None) is (usage is None)
    assert found is None or (found.prompt_tokens, found.completion_tokens) == (0, 0)
    assert read_usage(JSON, b"{}", is_completion=False) is None


@pytest.mark.parametrize("size", [0, 2 * MAX_DECODED_BYTES], ids=["small", "large"])
def test_an_answer_that_is_cut_anywhere_is_none(size: int) -> None:
    body = encode(USUAL | {"choices": [{"text": "x" * size}]})
    assert read(body) == (7, 3)
    for end in range(len(body) - 150, len(body)):
        with pytest.raises(NoAnswerError):
            read(body[:end])
    with pytest.raises(NoAnswerError):
        read(body[150:])


@pytest.mark.parametrize("body", [b"", b" ", b"null", b"[]", b"1", b'"a"', b"{}", b'{"error":{}}'])
def test_what_is_no_completion_is_none(body: bytes) -> None:
    with pytest.raises(NoAnswerError, match="answer"):
        read(body)


@pytest.mark.parametrize("kind", [b"", b"text/html", b"application/jsonx", b"text/event-stream"])
def test_the_error_names_the_content_type(kind: bytes) -> None:
    with pytest.raises(NoAnswerError, match=kind.decode() or "no content type"):
        read_usage({b"content-type": kind}, encode(USUAL), is_completion=True)


def test_only_other_paths_may_answer_in_bytes() -> None:
    headers = {b"content-type": b"application/octet-stream"}
    assert read_usage(headers, b"\0", is_completion=False) is None
    for body, is_completion in ((b"", False), (b"\0", True)):
        with pytest.raises(NoAnswerError):
            read_usage(headers, body, is_completion=is_completion)


values = st.recursive(
    st.none() | st.integers() | st.floats() | st.text() | st.just(10**400) | st.just("9" * 5_000),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
objects = st.fixed_dictionaries(
    {},
    optional={
        "choices": values,
        "usage": values | st.fixed_dictionaries({"prompt_tokens": values}),
    },
)


@given(
    st.binary() | values.map(encode) | objects.map(encode), st.binary(max_size=30), st.booleans()
)
def test_any_bytes_are_an_answer_or_an_error(body: bytes, kind: bytes, is_completion: bool) -> None:
    limit = MAX_DECODED_BYTES
    for answer in (body, body.replace(b"}", b"," + b" " * limit + b"}", 1)):
        for headers in (JSON, {b"content-type": kind}):
            try:
                collected = CollectedAnswer(answer).take()
                usage = read_usage(headers, collected, is_completion=is_completion)
            except NoAnswerError:
                continue
            assert usage is None or 0 <= usage.prompt_tokens <= 1 << 40
