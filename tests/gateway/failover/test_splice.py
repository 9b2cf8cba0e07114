"""Another engine's events as the rest of a stream."""

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.failover.splice import ContinuedStream, ReplayedStream, SpliceError
from cleave.gateway.failover.transcript import DONE_EVENT, TooDeepError, Transcript

HEAD = {"id": "first", "created": 1, "model": "m"}


def event(*choices: dict[str, Any], **fields: Any) -> bytes:
    value = {**HEAD, "choices": list(choices), **fields}
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def chat(content: str, ids: list[int] | None = None, index: int = 0, **fields: Any) -> dict:
    return {"index": index, "delta": {"content": content}, "token_ids": ids, **fields}


def transcript(*events: bytes) -> Transcript:
    seen = Transcript()
    for one in events:
        seen.add_event(one)
    seen.read()
    return seen


def turn_all(splice: ContinuedStream | ReplayedStream, *events: bytes) -> list[Any]:
    turned = b"".join(splice.rewrite(one.removesuffix(b"\n\n")) for one in events)
    parts = turned.split(b"\n\n")[:-1]
    return [
        "[DONE]" if part.endswith(b"[DONE]") else json.loads(part.removeprefix(b"data: "))
        for part in parts
    ]


def test_a_continued_chat_keeps_its_form_and_its_head() -> None:
    seen = transcript(event(chat("one", [7])))
    splice = ContinuedStream(seen, chat=True, tokens=1)
    other = {"id": "other", "created": 9, "object": "text_completion", "model": "m"}
    choice = {"index": 0, "text": " two", "prompt_token_ids": [1, 7], "token_ids": [8]}
    last = {**choice, "text": "", "finish_reason": "stop", "stop_reason": 2}
    usage: dict[str, object] = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
    usage["prompt_tokens_details"] = {"cached_tokens": 5}
    events = [
        event(choice, **other),
        event(last, **other),
        event(**other, usage=usage),
        DONE_EVENT,
    ]
    first, second, third, done = turn_all(splice, *events)
    assert {first[key] for key in ("id", "object")} == {"first", "chat.completion.chunk"}
    assert first["choices"] == [
        {"index": 0, "delta": {"content": " two"}, "logprobs": None, "finish_reason": None}
        | {"token_ids": [8]}
    ]
    assert second["choices"][0]["finish_reason"] == "stop"
    details = third["usage"].pop("prompt_tokens_details")
    assert third["usage"] == {"prompt_tokens": 4, "completion_tokens": 3, "total_tokens": 7}
    assert details == {"cached_tokens": 4}
    assert done == "[DONE]"


def test_a_continued_completion_hides_the_longer_prompt() -> None:
    splice = ContinuedStream(transcript(event({"index": 0, "text": "a"})), chat=False, tokens=1)
    (turned,) = turn_all(splice, event({"index": 0, "text": "b", "prompt_token_ids": [1, 2]}))
    assert turned["choices"] == [{"index": 0, "text": "b"}]


words = st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=8)


def cut(text: str, sizes: list[int]) -> list[str]:
    """The text in pieces of about these sizes."""
    pieces, start = [], 0
    for size in [*sizes, len(text)]:
        pieces.append(text[start : start + size])
        start += size
    return pieces


@given(words, st.lists(st.integers(0, 4), max_size=10), st.integers(0, 30), st.integers(1, 2))
def test_a_replay_adds_what_is_missing_however_its_events_are_cut(outputs, sizes, place, n) -> None:
    """Seen: a part of the first run's events. Replayed: the same text in other pieces."""
    text = "".join(outputs)
    first = [event(chat(piece, index=index)) for piece in outputs for index in range(n)]
    seen = transcript(event({"index": 0, "delta": {"role": "assistant"}}), *first[:place])
    sent = first[:place]
    known = {
        index: "".join(outputs[at // n] for at in range(len(sent)) if at % n == index)
        for index in range(n)
    }
    again = [event(chat(piece, index=index)) for piece in cut(text, sizes) for index in range(n)]
    ends = [event(chat("", index=index, finish_reason="stop")) for index in range(n)]
    rest = turn_all(ReplayedStream(seen), *again, *ends, DONE_EVENT)
    assert rest.pop() == "[DONE]"
    for index in range(n):
        choices = [c for value in rest for c in value["choices"] if c["index"] == index]
        added = "".join(choice["delta"].get("content", "") for choice in choices)
        assert known.get(index, "") + added == text
        assert [c["finish_reason"] for c in choices if c.get("finish_reason")] == ["stop"]


def test_a_replay_that_says_something_else_is_refused() -> None:
    splice = ReplayedStream(transcript(event(chat("one two"))))
    assert splice.rewrite(event(chat("one")).strip()) == b""
    with pytest.raises(SpliceError):
        splice.rewrite(event(chat(" tin")).strip())


def test_a_replayed_tool_call_goes_on_within_its_arguments() -> None:
    def call(**function: str) -> dict[str, Any]:
        return {"index": 0, "function": function}

    begun = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}
    seen = transcript(
        event({"index": 0, "delta": {"tool_calls": [begun]}}),
        event({"index": 0, "delta": {"tool_calls": [call(arguments='{"x": ')]}}),
    )
    rest = turn_all(
        ReplayedStream(seen),
        event({"index": 0, "delta": {"tool_calls": [begun | {"id": "b"}]}}),
        event({"index": 0, "delta": {"tool_calls": [call(arguments='{"x": 1')]}}),
        event({"index": 0, "delta": {"tool_calls": [call(arguments="}")]}}),
    )
    calls = [value["choices"][0]["delta"]["tool_calls"] for value in rest]
    assert calls == [[call(arguments="1")], [call(arguments="}")]]


def test_a_replay_counts_tokens_and_log_probabilities_off() -> None:
    def one(tokens: list[str]) -> dict[str, Any]:
        return {"index": 0, "text": "".join(tokens), "logprobs": {"tokens": tokens}}

    splice = ReplayedStream(transcript(event(one(["a"])), event(one(["b"]))))
    (rest,) = turn_all(splice, event(one(["a", "b", "c"])))
    assert rest["choices"] == [one(["c"])]


@pytest.mark.parametrize("seen", [True, False])
def test_the_prompts_ids_come_with_a_replay_if_they_have_not_come_before(seen: bool) -> None:
    first = event({"index": 0, "text": "a", "prompt_token_ids": [1]}, prompt_token_ids=[1])
    splice = ReplayedStream(transcript(first) if seen else transcript())
    again = event({"index": 0, "text": "ab", "prompt_token_ids": [1]}, prompt_token_ids=[1])
    (turned,) = turn_all(splice, again)
    assert ("prompt_token_ids" in turned) is not seen
    assert ("prompt_token_ids" in turned["choices"][0]) is not seen


def test_usage_is_reported_once() -> None:
    usage = event(usage={"prompt_tokens": 1})
    assert turn_all(ReplayedStream(transcript(event(chat("a")))), usage)
    assert turn_all(ReplayedStream(transcript(event(chat("a")), usage)), usage) == []


def test_an_error_stays_one() -> None:
    error = b'data: {"error": {"message": "no"}}'
    assert ReplayedStream(transcript()).rewrite(error) == error + b"\n\n"
    assert ContinuedStream(transcript(), chat=True, tokens=0).rewrite(error) == error + b"\n\n"


def test_a_value_that_is_nested_deep_is_not_spliced() -> None:
    """It would be walked in a Python call for each level."""
    deep = b'{"a":' * 400 + b'"b"' + b"}" * 400
    long = b'data: {"choices":[{"index":0,"delta":{"tool_calls":[%b]}}]}' % deep
    with pytest.raises(TooDeepError):
        ReplayedStream(transcript(event(chat("a")))).rewrite(long)


UNITS = [b'"a"', b"{}", b"1", b"[]", b'{"a":0}', b'"a","b"']


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("kind", [ContinuedStream, ReplayedStream])
def test_an_event_that_would_take_long_is_not_spliced_and_others_take_5_ms(kind, unit) -> None:
    sent = transcript(event(chat("a")))
    splice = ReplayedStream(sent) if kind is ReplayedStream else ContinuedStream(sent, True, 1)
    for count in (200_000, 2_000, 500):
        calls = b",".join([unit] * count)
        long = b'data: {"choices":[{"index":0,"delta":{"content":"a","tool_calls":[%b]}}]}' % calls
        costs = []
        for _ in range(3):
            begun = time.thread_time()
            refused = pytest.raises(SpliceError, match="too long")
            with refused if count > 500 else suppress(AttributeError):
                splice.rewrite(long)
            costs.append(time.thread_time() - begun)
        assert min(costs) < 0.005
