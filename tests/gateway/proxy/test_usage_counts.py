"""Tokens of streams without ids are those that the engine's usage reports, and stay hidden."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.http.stream_fields import TokenReport
from cleave.gateway.proxy.sse_relay import SseRelay
from cleave.gateway.proxy.usage_counts import UsageCounts

from tests.support.streams import DONE, borders, build_frame, cut, encode


def usage(prompt: int, output: int, **more: Any) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "total_tokens": prompt + output}
    return {"usage": counts | {"completion_tokens": output, **more}}


def build(index: int, text: str, **more: Any) -> bytes:
    choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
    return encode({**build_frame(chat=False), "choices": [choice], **more})


def relay(**report: Any) -> SseRelay:
    counts = UsageCounts(TokenReport(has_ids=False, **report))
    return SseRelay(b"", False, 0.0, usage=counts)


steps = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 9), st.text(max_size=4)), min_size=1, max_size=30
)


@given(steps, borders, st.booleans(), st.booleans(), st.booleans())
def test_the_tokens_of_all_choices_are_counted_at_every_event(
    steps, places, shows: bool, running: bool, details: bool
) -> None:
    stream = relay(num_choices=4, shows_usage=shows, shows_running_usage=shows and running)
    counts, events, plain = [0] * 4, [], []
    media = {"cached_tokens": 4, "multimodal_tokens": {"image": 3}}
    more = {"completion_tokens_details": {"reasoning_tokens": 1}} if details else {}
    more |= {"prompt_tokens_details": media} if details else {}
    for index, size, text in steps:
        counts[index] += size
        events.append(build(index, text, **usage(9, counts[index], **more)))
        plain.append(events[-1] if shows and running else build(index, text))
        stream.forward(events[-1], False)
        assert stream.num_tokens == stream.limit_tokens() == sum(counts)
    last = encode({**build_frame(chat=False), "choices": [], **usage(9, sum(counts), **more)})
    again = relay(num_choices=4, shows_usage=shows, shows_running_usage=shows and running)
    whole = b"".join([*events, last, DONE])
    sent = b"".join(again.forward(piece, False) for piece in cut(whole, places))
    assert sent == b"".join([*plain, last if shows else b"", DONE])
    assert (again.num_tokens, again.prompt_tokens) == (sum(counts), 9)


@pytest.mark.parametrize("index", [2, 99, 10**12])
def test_choices_that_were_not_requested_do_not_count(index: int) -> None:
    stream = relay(num_choices=2)
    stream.forward(build(index, "a", **usage(1, 500)), False)
    assert stream.num_tokens == 0


def test_several_prompts_count_once_their_sum_is_known() -> None:
    stream = relay(num_choices=2, num_prompts=2)
    stream.forward(build(0, "a", **usage(5, 1)) + build(1, "a", **usage(7, 2)), False)
    assert (stream.num_tokens, stream.prompt_tokens) == (3, 0)
    stream.forward(encode({**build_frame(chat=False), "choices": [], **usage(12, 3)}), False)
    assert (stream.num_tokens, stream.prompt_tokens) == (3, 12)


def test_a_replay_counts_nothing_twice() -> None:
    stream = relay(num_choices=1)
    for _ in range(2):
        for count in (1, 2, 3):
            stream.forward(build(0, "a", **usage(5, count)), False)
    assert stream.num_tokens == 3


@pytest.mark.parametrize("bad", ['"many"', "-1e400", "[1]", '{"a":{"b":{"c":{}}}}', "12"])
def test_usage_that_is_none_changes_nothing(bad: str) -> None:
    stream = relay(num_choices=1)
    event = build(0, "a").replace(b"}\n\n", b',"usage":%b}\n\n' % bad.encode())
    stream.forward(event, False)
    assert stream.num_tokens == 1


def test_text_that_looks_like_usage_is_text() -> None:
    stream, text = relay(num_choices=1), json.dumps({"a": 1, **usage(1, 999)})
    sent = stream.forward(build(0, f",{text}", **usage(5, 1)), False)
    assert (sent, stream.num_tokens) == (build(0, f",{text}"), 1)
