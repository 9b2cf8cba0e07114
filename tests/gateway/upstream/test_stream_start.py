"""A stream's first bytes: an answer, or a failure that came after the status."""

import pytest

from cleave.gateway.upstream.stream_start import (
    MAX_START_BYTES,
    StreamStart,
    classify_start,
    skip_role_deltas,
)

TOKEN = b'data: {"id":"c","choices":[{"index":0,"text":"one"}]}\n\n'
ROLE = b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
WORD = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"one"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def feed_start(start: bytes) -> StreamStart:
    return classify_start(start, skip_role_deltas(start))


def error(code: object) -> bytes:
    return b'data: {"error": {"message": "no", "type": "x", "param": null, "code": %b}}\n\n' % (
        str(code).encode()
    )


@pytest.mark.parametrize("start", [TOKEN, ROLE + WORD, ROLE + ROLE + WORD, b'data: {"id'])
def test_a_token_begins_the_stream(start: bytes) -> None:
    assert feed_start(start) is StreamStart.STARTED


@pytest.mark.parametrize("start", [b"", ROLE, ROLE + ROLE], ids=["nothing", "one", "two"])
def test_a_role_alone_is_not_a_handoff(start: bytes) -> None:
    assert feed_start(start) is StreamStart.PENDING


@pytest.mark.parametrize("code", [500, 503, "null", '"500"'])
@pytest.mark.parametrize("before", [b"", ROLE, ROLE + ROLE], ids=["first", "role", "roles"])
@pytest.mark.parametrize("after", [b"", DONE], ids=["alone", "done"])
def test_an_error_before_any_token_is_a_failure(before, code, after) -> None:
    assert feed_start(before + error(code) + after) is StreamStart.FAILED


@pytest.mark.parametrize("before", [b"", ROLE], ids=["first", "role"])
def test_an_error_cut_anywhere_is_one_once_it_is_whole(before) -> None:
    whole = before + error(500)
    verdicts = [feed_start(whole[:end]) for end in range(len(before), len(whole))]
    assert set(verdicts) == {StreamStart.PENDING}
    assert feed_start(whole) is StreamStart.FAILED


@pytest.mark.parametrize("start", [DONE, b"<html>\n\n", b"{}\n\n", b"\n\n", b"dat\n", b"\xff"])
def test_what_is_no_event_or_only_the_last_is_a_failure(start: bytes) -> None:
    assert feed_start(start) is StreamStart.FAILED


@pytest.mark.parametrize("start", [b": ping\n\n", b"event: delta\ndata: {}\n\n", b"id: 1\n"])
def test_other_lines_of_events_begin_a_stream(start: bytes) -> None:
    assert feed_start(start) is StreamStart.STARTED


@pytest.mark.parametrize("code", [400, 404, 422])
def test_an_error_that_is_the_clients_fault_goes_to_the_client(code: int) -> None:
    assert feed_start(error(code) + DONE) is StreamStart.STARTED


@pytest.mark.parametrize("content", [b'data: {"error": "boom"}\n\n', b'data: {"error": \xff}\n\n'])
def test_an_error_in_another_shape_is_a_failure(content: bytes) -> None:
    assert feed_start(content) is StreamStart.FAILED


def test_an_error_after_a_token_is_none_of_the_opening() -> None:
    assert feed_start(TOKEN + error(500)) is StreamStart.STARTED


def test_an_answer_that_speaks_of_errors_is_an_answer() -> None:
    assert feed_start(TOKEN.replace(b"one", b'data: {\\"error\\": 500}')) is StreamStart.STARTED


def test_what_is_held_is_limited() -> None:
    endless = b'data: {"error": "' + b"x" * MAX_START_BYTES
    assert feed_start(endless) is StreamStart.STARTED


@pytest.mark.parametrize(
    "whole",
    [
        ROLE + WORD,
        ROLE + ROLE + error(500) + DONE,
        ROLE.replace(b'"content":""', b'"content":"one"') + ROLE + WORD,
        ROLE + ROLE.replace(b'"content":""', b'"reasoning":"so"') + ROLE,
    ],
    ids=["word", "failure", "role with a word", "role with a reason"],
)
def test_what_was_looked_at_need_not_be_looked_at_again(whole: bytes) -> None:
    for first in range(len(whole)):
        at = skip_role_deltas(whole[:first])
        for second in range(first, len(whole)):
            assert skip_role_deltas(whole[:second], at) == skip_role_deltas(whole[:second])


def test_a_role_that_says_something_begins_the_stream() -> None:
    says = ROLE.replace(b'"content":""', b'"content":"one"')
    assert feed_start(says) is StreamStart.STARTED
    assert feed_start(says + ROLE) is StreamStart.STARTED
