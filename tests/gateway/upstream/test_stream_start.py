"""A stream's first bytes: an answer, or a failure that came after the status."""

import time

import pytest

from cleave.gateway.upstream.stream_start import (
    MAX_START_BYTES,
    PendingStart,
    StreamStart,
    classify_start,
)

TOKEN = b'data: {"id":"c","choices":[{"index":0,"text":"one"}]}\n\n'
ROLE = b'data: {"id":"c","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
WORD = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"one"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def feed_start(start: bytes) -> StreamStart:
    verdict = PendingStart().add(start)
    # What the short way decides is decided in the same way in full.
    assert classify_start(start) in (StreamStart.PENDING, verdict)
    return verdict


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
    "event",
    [
        b'data:{"error":{"code":500}}\n\n',
        b'data: { "error" : {"code":500}}\n\n',
        b'data: {"id":"c","error":{"code":500}}\n\n',
        b'data: {"err\\u006Fr":{"code":500}}\n\n',
        b'data: {"error"\ndata: :{"code":500}}\n\n',
        b'event: error\rdata: {"error":{"code":500}}\n\n',
        b"data: " + b"\r" * 1_000 + b"\n\n",
        b"data:[DONE]\n\n",
    ],
)
@pytest.mark.parametrize("before", [b"", ROLE], ids=["first", "role"])
def test_a_failure_is_one_however_it_is_spelled(before: bytes, event: bytes) -> None:
    assert feed_start(before + event) is StreamStart.FAILED


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
def test_it_is_the_same_wherever_it_is_cut(whole: bytes) -> None:
    for cut in range(1, len(whole)):
        held = PendingStart()
        first = held.add(whole[:cut])
        if first is StreamStart.PENDING:
            assert held.add(whole[cut:]) is feed_start(whole)
            assert held.data == whole


@pytest.mark.parametrize(
    "piece", [ROLE, b'data: {"error": "x', b"x"], ids=["roles", "errors", "bytes of an error"]
)
def test_a_start_without_an_end_is_forwarded_and_each_byte_costs_the_same(piece: bytes) -> None:
    costs, held = [], PendingStart()
    held.add(b'data: {"error": "' if piece == b"x" else b"")
    while True:
        begun = time.thread_time()
        verdict = held.add(piece)
        costs.append(time.thread_time() - begun)
        if verdict is not StreamStart.PENDING:
            break
    assert verdict is StreamStart.STARTED
    assert len(held.data) <= MAX_START_BYTES + len(piece)
    half = len(costs) // 2
    assert sum(costs[half:]) < 10 * sum(costs[:half]) + 0.01


def test_a_role_that_says_something_begins_the_stream() -> None:
    says = ROLE.replace(b'"content":""', b'"content":"one"')
    assert feed_start(says) is StreamStart.STARTED
    assert feed_start(says + ROLE) is StreamStart.STARTED
