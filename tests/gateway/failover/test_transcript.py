"""What is kept of a stream is enough to continue it, and little."""

import json
import random
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.failover.resumption import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    NotResumableError,
    Resumption,
    plan_resumption,
)
from cleave.gateway.failover.splice import ReplayedStream
from cleave.gateway.failover.transcript import (
    MAX_CHOICES,
    MAX_PARSED_BYTES,
    MAX_PENDING_BYTES,
    MAX_TEXTS,
    Transcript,
)
from cleave.gateway.http.buffer_budget import KEPT_SHARE, BufferBudget
from cleave.gateway.proxy.sse_relay import SseRelay

from tests.support.completions import build_colocated_body, parse_completion
from tests.support.streams import (
    DONE,
    PROMPT_IDS,
    Token,
    borders,
    build_event,
    build_stream,
    cut,
    encode,
    group,
    sizes,
    token_lists,
)
from tests.support.token_ids import list_ids

MESSAGES = [{"role": "user", "content": "hi"}]


def parse(chat: bool, **fields: Any):
    prompt = {"messages": MESSAGES} if chat else {"prompt": "hi"}
    body = {"model": "m", "stream": True, "max_tokens": 1_000, **prompt, **fields}
    path = CHAT_PATH if chat else COMPLETIONS_PATH
    return parse_completion(path, json.dumps(body).encode())


def count_settled(groups: list[list[Token]]) -> int:
    """Tokens up to the last one whose event had text."""
    ends = [0]
    for part in groups:
        ends.append(ends[-1] + len(part))
    with_text = [i + 1 for i, part in enumerate(groups) if any(token.text for token in part)]
    return ends[max(with_text, default=0)]


@given(token_lists, sizes, borders, st.sets(st.integers(0, 40)), st.booleans(), st.booleans())
def test_a_stream_is_continued_from_all_tokens_whose_text_was_sent(
    values, parts, places, read_at, chat: bool, shows_ids: bool
) -> None:
    """However the engine groups its tokens, wherever the bytes are cut, whenever it is read."""
    groups = group(values, parts)
    relay = SseRelay(b"", False, 0.0, True, False, shows_ids)
    for number, piece in enumerate(cut(b"".join(build_stream(groups, chat=chat)), places)):
        relay.forward(piece, False)
        if number in read_at:
            relay.read_transcript()
    sent, settled = relay.read_transcript(), count_settled(groups)
    ids = [token.id for token in values]
    assert (list_ids(sent), sent.num_ids, sent.num_settled) == (ids, len(ids), settled)
    completion = parse(chat, **({"return_token_ids": True} if shows_ids else {}))
    planned = plan_resumption(CHAT_PATH if chat else COMPLETIONS_PATH, completion, sent, 10_000)
    assert isinstance(planned, Resumption)
    assert planned.mode == "continued"
    body = json.loads(build_colocated_body(planned.completion))
    assert body["prompt"] == PROMPT_IDS + ids[:settled]
    assert body["max_tokens"] == 1_000 - settled
    assert sent.num_ids == (len(ids) if shows_ids else settled)


@given(token_lists, sizes, sizes, borders, st.integers(0, 40), st.booleans(), st.booleans())
def test_a_replay_gives_the_rest_of_the_text_however_both_runs_divide_it(
    values, parts, again, places, place: int, chat: bool, has_ids: bool
) -> None:
    groups = group(values, parts)
    relay = SseRelay(b"", False, 0.0, has_ids)
    events = build_stream(groups, chat=chat)[: place + 1]
    sent = b"".join(relay.forward(piece, False) for piece in cut(b"".join(events), places))
    splice = ReplayedStream(relay.read_transcript())
    whole = [*build_stream(group(values, again), chat=chat), build_event([], finish="stop"), DONE]
    rest = b"".join(splice.rewrite(event.removesuffix(b"\n\n")) for event in whole)
    assert read_text(sent) + read_text(rest) == "".join(token.text for token in values)
    assert rest.endswith(DONE)


def read_text(events: bytes) -> str:
    text = ""
    for event in events.split(b"\n\n"):
        if event and event != DONE.strip():
            for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
                said = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                text += said
    return text


def fill(budget: BufferBudget, count: int, size: int, **options: bool) -> list[Transcript]:
    kept = [Transcript(budget, num_choices=1, **options) for _ in range(count)]
    for one in kept:
        one.set_prompt_ids(b"1," * (size // 2) + b"1")
    return kept


def test_all_that_is_kept_is_reserved_and_given_back() -> None:
    budget = BufferBudget(1 << 20)
    relay = SseRelay(b"", False, 0.0, True, transcript=Transcript(budget, num_choices=1))
    for event in build_stream([[Token(123_456, " word")]] * 5_000, chat=True):
        relay.forward(event, False)
    assert 5_000 * 7 <= budget.used <= 5_000 * 7 + 4_096
    relay.close()
    assert budget.used == 0
    assert relay.num_tokens == 5_000


def test_without_room_a_stream_goes_on_but_nothing_is_kept_of_it() -> None:
    limit = 64 << 10
    budget = BufferBudget(limit)
    others = fill(budget, 3, 8 << 10)
    relay = SseRelay(b"", False, 0.0, True, transcript=Transcript(budget, num_choices=1))
    events = build_stream([[Token(123_456, " word")]] * 5_000, chat=False)
    sent = [relay.forward(event, False) for event in events]
    assert b"".join(sent).count(b" word") == relay.num_tokens == 5_000
    assert budget.used <= limit * KEPT_SHARE
    lost = relay.read_transcript()
    assert lost.is_dropped
    with pytest.raises(NotResumableError, match="no memory"):
        plan_resumption(COMPLETIONS_PATH, parse(False), lost, 10_000)
    assert not any(other.is_dropped for other in others)
    relay.close()
    for other in others:
        other.close()
    assert budget.used == 0


def test_a_finished_stream_needs_nothing_of_what_was_dropped() -> None:
    relay = SseRelay(b"", False, 0.0, True, transcript=Transcript(BufferBudget(0), num_choices=1))
    relay.forward(build_event([Token(1, "a")], prompt_token_ids=[1], finish="stop"), False)
    assert relay.transcript.is_dropped
    ending = plan_resumption(COMPLETIONS_PATH, parse(False), relay.read_transcript(), 100)
    assert ending.events == DONE


def test_kept_streams_leave_half_of_the_budget_to_requests() -> None:
    budget = BufferBudget(64 << 10)
    fill(budget, 100, 4 << 10)
    assert budget.reserve(int(64 * (1 - KEPT_SHARE)) << 10)


LOGPROBS = {"content": [{"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": []}] * 50}


@pytest.mark.parametrize("keeps_text", [True, False])
def test_of_log_probabilities_only_their_number_is_kept(keeps_text: bool) -> None:
    sent = Transcript(keeps_text=keeps_text, num_choices=1)
    event = build_event([Token(1, "a")], chat=True, ids=False).replace(
        b'"logprobs":null', b'"logprobs":' + json.dumps(LOGPROBS).encode()
    )
    for _ in range(200):
        sent.add_event(event)
        assert sum(len(data) for _, data, _ in sent._pending) <= MAX_PENDING_BYTES + len(event)
    sent.read()
    assert sent.choices[0].counts == ({("logprobs", "content"): 10_000} if keeps_text else {})
    assert sent.has_output


def test_an_event_that_is_too_large_to_be_parsed_ends_a_replay_but_not_a_continuation() -> None:
    relay = SseRelay(b"", False, 0.0, True, transcript=Transcript(num_choices=1))
    relay.forward(build_event([Token(7, "a" * MAX_PARSED_BYTES)], prompt_token_ids=[1]), False)
    sent = relay.read_transcript()
    assert plan_resumption(COMPLETIONS_PATH, parse(False), sent, 9_999).mode == "continued"
    assert sent.num_settled == 1
    stopped = parse(False, stop=["x"], temperature=0)
    with pytest.raises(NotResumableError, match="too large"):
        plan_resumption(COMPLETIONS_PATH, stopped, sent, 9_999)


@pytest.mark.parametrize("index", [-1, 2, MAX_CHOICES, 1 << 40])
def test_an_engine_cannot_make_up_choices(index: int) -> None:
    sent = Transcript(num_choices=2)
    sent.add_event(encode({"choices": [{"index": index, "text": "a"}]}))
    sent.read()
    assert sent.has_unknown_events
    assert not sent.choices


def test_a_stream_of_several_choices_is_finished_when_all_of_them_are() -> None:
    sent = Transcript(keeps_ids=False, keeps_text=False, num_choices=2)
    for index in (0, 1):
        assert not sent.finished
        sent.add_event(build_event([Token(1, "a")], ids=False, index=index))
        sent.add_event(build_event([], ids=False, index=index, finish="stop"))
        sent.read()
    assert sent.finished


def nest(number: int, depth: int) -> dict[str, Any]:
    return {"a": nest(number, depth - 1)} if depth else {"b": f"text {number}"}


def make_any_call(number: int) -> dict[str, Any]:
    rng = random.Random(number)
    names = [rng.choice("aé中😀") * rng.choice([1, 20, 90, 200]) for _ in range(3)]
    values = [rng.choice(["x", [1], {"y": [2]}, nest(number, 3)]) for _ in names]
    return {"index": number, **dict(zip(names, values, strict=True))}


CALLS: dict[str, tuple[int, Callable[[int], dict[str, Any]]]] = {
    "calls": (
        6_000,
        lambda n: {"index": n, "id": "i", "function": {"name": "f", "arguments": "a"}},
    ),
    "lists": (20_000, lambda n: {"index": n, "x": [1]}),
    "long names": (200, lambda n: {"index": n, str(n) + "x" * 60_000: "a"}),
    "long names of lists": (200, lambda n: {"index": n, str(n) + "x" * 60_000: [1]}),
    "deep values": (200, lambda n: nest(n, 400)),
    "any": (2_000, make_any_call),
}


@pytest.mark.parametrize("kind", CALLS)
def test_any_number_of_tool_calls_takes_a_bounded_memory_in_short_steps(kind: str) -> None:
    """Least of some runs: the machine stalls at times."""
    count, make = CALLS[kind]
    calls = [json.dumps(make(number), ensure_ascii=False).encode() for number in range(count)]
    events = [
        b'data: {"choices":[{"index":0,"delta":{"tool_calls":[%b]}}]}\n\n'
        % b",".join(calls[at : at + count // 200])
        for at in range(0, count, count // 200)
    ]

    def read_all() -> tuple[Transcript, BufferBudget, float]:
        budget, worst = BufferBudget(1 << 26), 0.0
        kept = Transcript(budget, keeps_ids=False, num_choices=1)
        for each in events:
            begun = time.thread_time()
            kept.add_event(each)
            worst = max(worst, time.thread_time() - begun)
        return kept, budget, worst

    assert min(read_all()[2] for _ in range(3)) < 0.005
    tracemalloc.start()
    _kept, budget, _ = read_all()
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken <= budget.used + (32 << 10)
    assert budget.used <= (MAX_TEXTS + 1) << 10
