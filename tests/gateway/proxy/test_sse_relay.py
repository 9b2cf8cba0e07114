"""A stream goes by: whole events only, nothing secret, and an end that both sides notice."""

import gc
import itertools
import json
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.failover import transcript
from cleave.gateway.failover.transcript import Transcript
from cleave.gateway.http.buffer_budget import BufferBudget
from cleave.gateway.http.errors import build_engine_error
from cleave.gateway.http.stream_fields import TokenReport
from cleave.gateway.proxy.event_splitter import MAX_EVENT_BYTES
from cleave.gateway.proxy.sse_relay import MAX_SLOW_EVENTS, SseRelay, StreamLostError
from cleave.gateway.proxy.usage_counts import UsageCounts
from cleave.gateway.upstream.kv_transfer_params import HandoffError

from tests.support.streams import Token, build_event
from tests.support.token_ids import list_ids

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
    assert stream.transcript.prompt_ids == b"5,6,7"
    assert list_ids(stream.transcript) == [8]


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("ids", [[], [1], [1, 22, 333]])
def test_several_events_of_a_piece_lose_their_ids_and_nothing_else(number, ids) -> None:
    text = 'quoted ,"token_ids":[7] and ]'
    with_ids, without = event(text, token_ids=ids, end=1), event(text, end=1)
    stream = relay(has_token_ids=True)
    assert stream.forward(with_ids * number, False) == without * number
    assert list_ids(stream.transcript) == ids * number


def test_a_client_that_requested_ids_gets_them() -> None:
    first = b'data: {"choices":[{"text":"a","prompt_token_ids":[5,6],"token_ids":[7]}]}\n\n'
    stream = relay(has_token_ids=True, return_token_ids=True)
    assert stream.forward(first, False) == first
    assert stream.transcript.prompt_ids == b"5,6"


def test_a_break_is_reported_after_the_last_whole_event() -> None:
    stream = relay()
    stream.forward(event("one") + b'data: {"half', False)
    error_end = stream.build_error_end(build_engine_error(502, "gone"))
    assert json.loads(error_end.removeprefix(b"data: "))["error"]["message"] == "gone"


def spend(count: int, text: str, *, ids: bool, keeps_text: bool = True) -> tuple[float, float]:
    """(CPU seconds, the longest step) of a stream of so many events; the least of three runs."""
    part, totals, worst = [Token(123_456, text)], [], []
    event = build_event(part, chat=True, ids=ids)
    for _ in range(3):
        sent = Transcript(BufferBudget(64 << 20), keeps_text=keeps_text, num_choices=1)
        stream = SseRelay(b"", True, 0.0, ids, transcript=sent)
        steps, last = [], time.process_time()
        for _ in range(count // 64):
            for _ in range(64):
                stream.forward(event, False)
            now = time.process_time()
            steps.append(now - last)
            last = now
        totals.append(sum(steps))
        worst.append(sorted(steps)[-3])
        assert stream.read_transcript().choices[0].finished is False
        stream.close()
    return min(totals), min(worst)


@pytest.mark.parametrize("ids", [False, True])
def test_an_event_of_a_long_stream_costs_what_one_of_a_short_stream_costs(ids: bool) -> None:
    short, _ = spend(2_048, " word" * 8, ids=ids)
    long, step = spend(32_768, " word" * 8, ids=ids)
    assert long < 3 * 16 * short, "it took 16 times as much for each event"
    assert step < 40 * short / 32, "no step of 64 events reads what came before"


@pytest.mark.parametrize("shows_ids", [False, True])
def test_little_is_kept_of_many_streams_with_log_probabilities(shows_ids: bool) -> None:
    """600 streams of 200 tokens: 200 MiB, if their events were kept."""
    top = [{"token": f" t{n}", "logprob": -12.3456789, "bytes": [32, 116]} for n in range(20)]
    entry = {"token": " w", "logprob": -1.2, "bytes": [32], "top_logprobs": top}
    event = build_event([Token(7, " w")], chat=True).replace(
        b'"logprobs":null', b'"logprobs":{"content":[%b]}' % json.dumps(entry).encode()
    )
    budget, streams = BufferBudget(64 << 20), []
    for _ in range(30):
        sent = Transcript(budget, keeps_text=shows_ids, shows_ids=shows_ids, num_choices=1)
        streams.append(SseRelay(b"", True, 0.0, True, False, shows_ids, transcript=sent))
    for stream in streams:
        stream.forward(event, False)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for stream in streams:
        for _ in range(200):
            stream.forward(event, False)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert grown < 30 * 16_384


@pytest.mark.interpreted
def test_few_of_very_many_small_events_in_one_piece_are_parsed(monkeypatch) -> None:
    """Each is unlike the others, so that no template matches; vLLM writes none so small."""
    events = [b'data: {"choices":[{"text":"a","x%d":1}]}\n\n' % number for number in range(6_000)]
    parsed = []
    decode = transcript.decode_stream_event
    monkeypatch.setattr(
        transcript, "decode_stream_event", lambda data: parsed.append(data) or decode(data)
    )
    stream = relay(has_token_ids=True)
    assert stream.forward(b"".join(events), False) == b"".join(events)
    assert 6_000 <= stream.limit_tokens() <= len(b"".join(events))
    assert len(parsed) <= MAX_SLOW_EVENTS


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"choices":[{"index":"x","text":1}]}',
        b'data: {"choices":7}',
        b'data: {"choices":[7]}',
        b'data: {"choices":[{"delta":[1]}],"usage":{"prompt_tokens":"a"}}',
        b'data: {"choices":[{"text":"a","token_ids":[1,,2]}]}',
        b'data: {"choices":[{"text":"a","token_ids":["x"]}]}',
        b'data: {"prompt_token_ids":[{"a":1}],"choices":[{"text":"a","prompt_token_ids":["a"]}]}',
        b"data: [[[[",
        b": comment",
        b"",
    ],
)
@given(data=st.data())
def test_events_of_any_form_are_relayed_and_end_nothing(event: bytes, data) -> None:
    stream = relay(has_token_ids=data.draw(st.booleans()))
    good = build_event([Token(7, "a")], chat=True, ids=data.draw(st.booleans()))
    order = data.draw(st.lists(st.sampled_from([event + b"\n\n", good]), max_size=6))
    for piece in order:
        stream.forward(piece, False)
    stream.read_transcript()
    assert stream.limit_tokens() >= 0
    assert stream.forward(DONE, True).endswith(DONE)


TOKEN = event("one", finish_reason=None, token_ids=[5])


@pytest.mark.parametrize("rest", [DONE, event("more") + DONE, b": ping\n\n", b"data: {"])
def test_nothing_follows_the_end(rest: bytes) -> None:
    assert pass_all(relay(), [TOKEN + DONE]) == TOKEN + DONE
    stream = relay()
    assert stream.forward(TOKEN + DONE + rest[: rest.rfind(b"\n") + 1], False) == TOKEN + DONE
    stream = relay()
    assert stream.forward(TOKEN + DONE, False) == TOKEN + DONE
    with pytest.raises(StreamLostError) as lost:
        stream.forward(rest, True)
    assert lost.value.data == b""
    assert stream.read_transcript().done
    assert stream.build_error_end(build_engine_error(502, "x")) == b""


@pytest.mark.parametrize(
    "spelled",
    [
        b'data:{"error":{"message":"boom","code":500}}\n\n',
        b'data: { "error" : {"message":"boom"}}\n\n',
        b'data: {"id":"c","error":{"message":"boom"}}\n\n',
        b'data: {"err\\u006fr":{"message":"boom"}}\n\n',
        b'data: {"error"\rdata: :{"message":"boom"}}\n\n',
        event("", finish_reason="abort").replace(b":", b": "),
        event("", finish_reason="abort").replace(b'"abort"', b'"\\u0061bort"'),
        event("", finish_reason="abort").replace(b'"finish_reason":', b'"finish_reason"\ndata::'),
    ],
)
@pytest.mark.parametrize("ids", [False, True])
def test_an_engine_that_gives_up_is_noticed_however_it_spells_that(spelled: bytes, ids) -> None:
    stream = relay(has_token_ids=ids)
    stream.forward(TOKEN, False)
    with pytest.raises(StreamLostError):
        stream.forward(spelled, False)


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("letter", range(len("kv_transfer_params")))
def test_a_handoff_is_found_however_its_key_is_spelled(letter: int, opaque: bool) -> None:
    name = "kv_transfer_params"
    for form in ("%s\\u%04x%s", "%s\\u%04X%s"):
        key = form % (name[:letter], ord(name[letter]), name[letter + 1 :])
        text = b'data: {"choices":[{"index":0,"text":"a"}],"%b" : {"remote_host":"h"}}\n\n'
        with pytest.raises(HandoffError):
            relay(opaque=opaque).forward(text % key.encode(), False)


def test_an_error_event_hands_no_handoff_over() -> None:
    text = b'data: {"error":{"code":400},"type":"error","kv_transfer_params":{"a":1}}\n\n'
    with pytest.raises(HandoffError):
        relay().forward(text, False)


def test_long_json_with_escaped_letters_is_not_searched() -> None:
    long = event("one").replace(b'"one"', b'"\\u0061' + b"x" * (64 << 10) + b'"')
    with pytest.raises(StreamLostError, match="escaped"):
        relay().forward(long, False)


@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize("ids", [False, True])
def test_a_long_prompts_ids_are_counted_and_shown_only_if_requested(shows: bool, ids) -> None:
    prompt = list(range(100_000, 300_000))
    first = event("one", finish_reason=None, token_ids=[5], prompt_token_ids=prompt)
    assert len(first) > MAX_EVENT_BYTES
    kept = Transcript(BufferBudget(1 << 26))
    stream = SseRelay(b"", False, 0.0, ids, return_token_ids=shows, transcript=kept)
    pieces = [first[at : at + 4_096] for at in range(0, len(first), 4_096)]
    sent = pass_all(stream, [*pieces, DONE])
    assert sent == (first if shows or not ids else event("one", finish_reason=None)) + DONE
    if ids:
        assert stream.prompt_tokens == len(prompt)
        assert kept.prompt_ids.startswith(b"100000,100001,")


DENSE = {
    "keys": b'"kv_transfer_params"',
    "errors": b'"error"',
    "aborts": b'"finish_reason":"abort"'.replace(b'"a', b'"b'),
    "objects": b"{}",
    "lists": b"[]",
    "texts": b'"a"',
    "numbers": b"1",
    "usage": b'1,"usage":{',
    "ids": b'1,"token_ids":[',
    "prompts": b'1,"prompt_token_ids":[',
    "members": b'{"a":"b"}',
}


@pytest.mark.parametrize("unit", DENSE.values(), ids=DENSE)
@pytest.mark.parametrize("place", ["logprobs", "tool_calls", "end"])
def test_no_event_takes_longer_than_5_ms(unit: bytes, place: str) -> None:
    """Least of some runs: the machine stalls at times."""
    start, end = b'data: {"id":"c","choices":[{"index":0,', b"}]}\n\n"
    places = {
        "logprobs": b'"text":"x","logprobs":{"tokens":[%b]},"token_ids":[5]',
        "tool_calls": b'"delta":{"content":"x","tool_calls":[%b]},"token_ids":[5]',
        "end": b'"text":"x","token_ids":[5],"z":[%b]',
    }
    for size in (MAX_EVENT_BYTES - 300, 60 << 10, 900 * len(unit)):
        whole = start + places[place] % b",".join([unit] * (size // (len(unit) + 1))) + end
        for ids in (True, False):
            usage = None if ids else UsageCounts(TokenReport(has_ids=False, num_choices=2))
            assert min(measure_event(whole, ids, usage) for _ in range(3)) < 0.005


def measure_event(whole: bytes, ids: bool, usage: UsageCounts | None) -> float:
    """CPU seconds of the longest step."""
    kept = Transcript(BufferBudget(1 << 26), num_choices=1)
    stream, worst = SseRelay(b"", True, 0.0, ids, transcript=kept, usage=usage), 0.0
    stream.forward(TOKEN, False)
    for at in range(0, len(whole), 4_096):
        begun = time.thread_time()
        stream.forward(whole[at : at + 4_096], False)
        worst = max(worst, time.thread_time() - begun)
    return worst
