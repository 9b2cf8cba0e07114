"""A stream goes by: whole events only, nothing secret, and an end that both sides notice."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.http.errors import build_engine_error
from cleave.gateway.proxy.sse_relay import COMPACTION_MASK, SseRelay, StreamLostError
from cleave.gateway.upstream.kv_transfer_params import HandoffError

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
SECRET = b'data: {"text":"a","kv_transfer_params": {"remote_engine_id":"e"}}\n\n'
DONE = b"data: [DONE]\n\n"
borders = st.lists(st.integers(0, 10_000), max_size=30)


def event(text: str, **fields: object) -> bytes:
    value = {"id": "c", "choices": [{"index": 0, "text": text, **fields}]}
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def cut(stream: bytes, borders: list[int]) -> list[bytes]:
    marks = [0, *sorted(b % len(stream) for b in borders), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(marks) if b > a]


def relay(**options: bool) -> SseRelay:
    return SseRelay(b"", False, 0.0, **options)


def pass_all(stream: SseRelay, pieces: list[bytes]) -> bytes:
    sent = [stream.forward(piece, False) for piece in pieces]
    return b"".join([*sent, stream.forward(b"", True)])


@given(borders)
def test_a_hand_off_is_found_wherever_the_stream_is_cut(borders: list[int]) -> None:
    stream, passed = relay(), b""
    *before, last = cut(event("x") + SECRET, borders)
    for piece in before:
        passed += stream.forward(piece, False)
    with pytest.raises(HandoffError):
        stream.forward(last, False)
    assert b"remote_engine_id" not in passed


@pytest.mark.parametrize("odd", [b": %b\n\n", b"data: {%b}  \n\n", b"%b\n\n"])
def test_a_hand_off_is_found_in_what_is_no_event_of_ours(odd: bytes) -> None:
    with pytest.raises(HandoffError):
        relay().forward(odd % b'"kv_transfer_params": {"remote_engine_id": 1}', False)


@given(borders, st.integers(0, 6))
def test_events_pass_unchanged_and_whole_wherever_the_stream_is_cut(borders, events: int) -> None:
    whole = event("data: \n\n {}") * events + DONE
    stream, sent = relay(), b""
    for piece in cut(whole, borders):
        sent += stream.forward(piece, False)
        assert sent.endswith(b"\n\n") or not sent
    assert sent + stream.forward(b"", True) == whole
    assert stream.num_events == events


def test_the_head_goes_before_the_first_event() -> None:
    stream = SseRelay(HEAD, True, 0.0)
    assert stream.forward(b"data: {", False) == HEAD
    assert stream.forward(b"}\n\n", False) == b"a\r\ndata: {}\n\n\r\n"


@pytest.mark.parametrize("events", [b"", event("one")], ids=["at first", "after a token"])
@pytest.mark.parametrize("code", [500, None], ids=str)
def test_an_engines_error_ends_its_stream_and_is_not_the_clients(events: bytes, code) -> None:
    error = b"data: " + json.dumps({"error": {"message": "no", "code": code}}).encode() + b"\n\n"
    with pytest.raises(StreamLostError, match="reported an error") as lost:
        relay().forward(events + error + DONE, False)
    assert lost.value.data == events


def test_an_engine_that_aborts_the_request_has_not_ended_it() -> None:
    with pytest.raises(StreamLostError, match="gave the request up") as lost:
        relay().forward(event("one") + event("", finish_reason="abort") + DONE, True)
    assert lost.value.data == event("one")


def test_a_refusal_passes_in_openais_form() -> None:
    refusal = {"message": "no", "type": "BadRequestError", "code": 400}
    error = b"data: " + json.dumps({"error": refusal}).encode() + b"\n\n"
    sent = relay().forward(event("one") + error + DONE, True)
    first, relayed, last = sent.split(b"\n\n", 2)
    assert (first + b"\n\n", last) == (event("one"), DONE)
    assert json.loads(relayed.removeprefix(b"data: "))["error"] == {
        "message": "no", "type": "invalid_request_error", "param": None, "code": None
    }  # fmt: skip


@pytest.mark.parametrize("rest", [b"", b'data: {"ha'], ids=["between events", "within one"])
def test_a_stream_that_ends_without_done_is_lost(rest: bytes) -> None:
    stream = relay()
    assert stream.forward(event("one") + rest, False) == event("one")
    with pytest.raises(StreamLostError, match="early"):
        stream.forward(b"", True)


def test_of_other_answers_nothing_is_known_and_all_passes() -> None:
    whole = b"event: ping\ndata: 1"
    assert relay(opaque=True).forward(whole, True) == whole


def test_ids_are_hidden_from_the_client_but_not_lost() -> None:
    first = b'data: {"choices":[{"text":"a","prompt_token_ids":[5,6,7],"token_ids":[8]}]}\n\n'
    stream = SseRelay(HEAD, False, 0.0, has_token_ids=True)
    sent = stream.forward(first[:30], False) + stream.forward(first[30:], False)
    assert sent == HEAD + b'data: {"choices":[{"text":"a"}]}\n\n'
    assert stream.prompt_ids == b"5,6,7"
    assert stream.read_transcript().choices[0].token_ids == [8]


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("ids", [[], [1], [1, 22, 333]])
def test_several_events_of_a_piece_lose_their_ids_and_nothing_else(number, ids) -> None:
    text = 'quoted ,"token_ids":[7] and ]'
    with_ids, without = event(text, token_ids=ids, end=1), event(text, end=1)
    stream = relay(has_token_ids=True)
    assert stream.forward(with_ids * number, False) == without * number
    assert stream.read_transcript().choices[0].token_ids == ids * number


def test_a_client_that_requested_ids_gets_them() -> None:
    first = b'data: {"choices":[{"text":"a","prompt_token_ids":[5,6],"token_ids":[7]}]}\n\n'
    stream = relay(has_token_ids=True, return_token_ids=True)
    assert stream.forward(first, False) == first
    assert stream.prompt_ids == b"5,6"


def test_a_break_is_reported_after_the_last_whole_event() -> None:
    stream = relay()
    stream.forward(event("one") + b'data: {"half', False)
    error_end = stream.build_error_end(build_engine_error(502, "gone"))
    assert json.loads(error_end.removeprefix(b"data: "))["error"]["message"] == "gone"


def test_long_streams_are_stored_as_text() -> None:
    stream = relay()
    for _ in range(3 * COMPACTION_MASK):
        stream.forward(event("ab", token_ids=[1]), False)
    assert len(stream._sent_pieces) <= COMPACTION_MASK + 1
    seen = stream.read_transcript().choices[0]
    assert seen.texts["text",] == "ab" * 3 * COMPACTION_MASK
    assert len(seen.token_ids) == 3 * COMPACTION_MASK
    assert stream.forward(DONE, True) == DONE


def count(stream: SseRelay, *events: bytes) -> int:
    pass_all(stream, [*events, DONE])
    return stream.count_tokens()


def test_tokens_are_counted_by_their_ids_by_text_or_by_event() -> None:
    ids = event("ab", token_ids=[1, 2, 3, 4])
    assert count(relay(has_token_ids=True), ids, ids) == 8
    assert count(relay(has_token_ids=True, return_token_ids=True), *[ids] * 3_000) == 12_000
    assert count(relay(), event("x" * 400)) == 100
    assert count(relay(), *[event("x")] * 7) == 7
    assert count(relay(), event("ab", logprobs={"tokens": ["a", "b", "c"]})) == 3


def test_tokens_of_other_apis_are_counted_by_their_usage() -> None:
    delta = b'event: d\ndata: {"type":"d","delta":"many tokens"}\n\n'
    end = b'event: e\ndata: {"type":"e","usage":{"output_tokens": 50}}\n\n'
    assert count(relay(opaque=True), delta, end) == 50
    assert count(relay(opaque=True), delta, delta) == 2
