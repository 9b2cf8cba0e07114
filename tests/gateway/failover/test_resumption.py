"""The request to another engine when a stream has lost its own."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from cleave.gateway.failover.resumption import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    NotResumableError,
    Resumption,
    StreamEnding,
    is_repeatable,
    plan_resumption,
)
from cleave.gateway.failover.splice import SpliceError
from cleave.gateway.failover.transcript import Transcript
from cleave.gateway.proxy.sse_relay import SseRelay

from tests.support.completions import build_colocated_body, parse_completion
from tests.support.token_ids import list_ids

PROMPT_IDS = b"11,12,13"
MESSAGES = [{"role": "user", "content": "hi"}]


def read(**fields: Any):
    request = {"model": "m", "prompt": "hi", "stream": True, **fields}
    if "messages" in fields:
        del request["prompt"]
    path = CHAT_PATH if "messages" in fields else COMPLETIONS_PATH
    return parse_completion(path, json.dumps(request).encode())


def see(
    *tokens: tuple[str, int], chat: bool = False, ids: bytes = PROMPT_IDS, **last: Any
) -> Transcript:
    relay = SseRelay(b"", False, 0.0, True)
    relay.transcript.set_prompt_ids(ids)
    choices: list[dict[str, Any]] = []
    if chat:
        choices.append({"index": 0, "delta": {"role": "assistant", "content": ""}})
    for text, number in tokens:
        part: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
        choices.append({"index": 0, **part, "token_ids": [number]})
    if last:
        choices[-1] |= last
    for choice in choices:
        relay.forward(build_event(choice) + b"\n\n", False)
    return relay.read_transcript()


def at_depth(frames: int, call: Callable[[], Any]) -> Any:
    """What `call` returns with so many frames more on the stack."""
    return at_depth(frames - 1, call) if frames else call()


def build_event(choice: dict[str, Any]) -> bytes:
    value = {"id": "c", "choices": [{"index": 0, **choice}]}
    return b"data: " + json.dumps(value, separators=(",", ":")).encode()


def resume(completion, seen, path=COMPLETIONS_PATH, limit=100) -> Resumption:
    planned = plan_resumption(path, completion, seen, limit)
    assert isinstance(planned, Resumption)
    return planned


def body_of(planned: Resumption) -> dict[str, Any]:
    return json.loads(build_colocated_body(planned.completion))


def test_prompt_and_tokens_so_far_become_the_prompt() -> None:
    request = {
        "max_tokens": 10,
        "min_tokens": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "ignore_eos": True,
    }
    planned = resume(read(**request), see(("a", 21), ("b", 22)))
    assert planned.mode == "continued"
    assert body_of(planned) == {
        "model": "m",
        "stream": True,
        "return_token_ids": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "ignore_eos": True,
        "prompt": [11, 12, 13, 21, 22],
        "max_tokens": 8,
        "min_tokens": 3,
    }


def test_a_chat_goes_on_as_a_completion() -> None:
    request = read(messages=MESSAGES, max_completion_tokens=10, chat_template_kwargs={"x": 1})
    planned = resume(request, see(("a", 21), chat=True), CHAT_PATH)
    assert planned.path == COMPLETIONS_PATH
    assert body_of(planned) == {
        "model": "m",
        "stream": True,
        "return_token_ids": True,
        "prompt": [11, 12, 13, 21],
        "max_tokens": 9,
    }


@pytest.mark.parametrize(
    ("path", "left"), [(CHAT_PATH, 96), (COMPLETIONS_PATH, 15)], ids=["chat", "text"]
)
def test_without_a_limit_the_apis_own_counts(path: bytes, left: int) -> None:
    chat = path == CHAT_PATH
    request = read(messages=MESSAGES) if chat else read()
    planned = resume(request, see(("a", 21), chat=chat), path)
    assert body_of(planned)["max_tokens"] == left


def test_tokens_without_their_text_are_generated_again() -> None:
    """Half a character is nothing that a client has seen."""
    seen = see(("a", 21), ("", 22), ("", 23))
    assert body_of(resume(read(max_tokens=9), seen))["prompt"] == [11, 12, 13, 21]
    assert (list_ids(seen), seen.num_ids) == ([21], 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ["x"]},
        {"n": 2},
        {"logprobs": 0},
        {"seed": 0},
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"frequency_penalty": 0.5},
        {"echo": True},
        {"prompt": ["a", "b"]},
    ],
    ids=str,
)
def test_what_hangs_on_its_engine_is_replayed_if_it_can_be(fields: dict[str, Any]) -> None:
    seen = see(("a", 21))
    again = read(**fields, temperature=0)
    planned = resume(again, seen)
    assert (planned.mode, planned.path, planned.completion) == ("replayed", COMPLETIONS_PATH, again)
    if "seed" not in fields:
        with pytest.raises(NotResumableError, match="sampled"):
            plan_resumption(COMPLETIONS_PATH, read(**fields, temperature=1), seen, 100)


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1},
        {"stop": None},
        {"stop": []},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [{"type": "function"}], "tool_choice": "none"},
        {"frequency_penalty": 0, "presence_penalty": 0.0},
        {"response_format": {"type": "text"}},
        {"logprobs": None},
        {"stream_options": {"include_usage": True}, "min_tokens": 3},
    ],
    ids=str,
)
def test_values_that_ask_for_nothing_bind_nothing(fields: dict[str, Any]) -> None:
    assert resume(read(**fields, temperature=1), see(("a", 21))).mode == "continued"


def test_a_client_may_ask_for_ids_itself() -> None:
    request = read(return_token_ids=True)
    assert (request.report.has_ids, request.report.shows_ids) == (True, True)
    assert resume(request, see(("a", 21))).mode == "continued"
    for value in (False, None):
        request = read(return_token_ids=value)
        assert (request.report.has_ids, request.report.shows_ids) == (True, False)
    assert not read(return_token_ids="maybe").report.has_ids, "the engine refuses it"


def test_a_client_that_requested_ids_gets_each_once_though_its_text_came_later() -> None:
    seen = see(("a", 21), ("", 22))
    for _ in range(2):  # The engine that goes on is lost as well.
        planned = resume(read(return_token_ids=True), seen)
        assert body_of(planned)["prompt"] == [11, 12, 13, 21]
        rest = [{"text": "", "token_ids": [22]}, {"text": "é", "token_ids": [23]}]
        turned = [planned.splice.rewrite(build_event(choice)) for choice in rest]
        assert b'"token_ids":[]' in turned[0]
        assert b'"token_ids":[23]' in turned[1]
    other = resume(read(return_token_ids=True), seen).splice
    with pytest.raises(SpliceError, match="otherwise"):
        other.rewrite(build_event({"text": "b", "token_ids": [29]}))


def test_without_ids_only_a_repeatable_answer_goes_on() -> None:
    seen = see(("a", 21), ids=b"")
    assert resume(read(temperature=0), seen).mode == "replayed"
    with pytest.raises(NotResumableError):
        plan_resumption(COMPLETIONS_PATH, read(temperature=1), seen, 100)


@pytest.mark.parametrize("part", ["reasoning", "reasoning_content", "refusal"])
def test_what_the_engine_parses_is_not_continued_as_text(part: str) -> None:
    seen = see(("a", 21), chat=True)
    value = {"choices": [{"index": 0, "delta": {part: "hm"}}]}
    seen.add_event(b"data: " + json.dumps(value).encode() + b"\n\n")
    seen.read()
    assert resume(read(messages=MESSAGES, temperature=0), seen, CHAT_PATH).mode == "replayed"


def test_a_prompt_with_pictures_is_more_than_its_tokens() -> None:
    content = [{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "x"}}]
    request = read(messages=[{"role": "user", "content": content}], temperature=0)
    assert resume(request, see(("a", 21), chat=True), CHAT_PATH).mode == "replayed"
    request = read(messages=[{"role": "user", "content": content[:1]}], temperature=0)
    assert resume(request, see(("a", 21), chat=True), CHAT_PATH).mode == "continued"


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
def test_an_answer_of_which_only_the_end_is_missing_is_ended_here(chat: bool) -> None:
    path = CHAT_PATH if chat else COMPLETIONS_PATH
    fields = {"messages": MESSAGES} if chat else {}
    request = read(**fields, max_tokens=2, stream_options={"include_usage": True})
    ending = plan_resumption(path, request, see(("a", 21), ("b", 22), chat=chat), 100)
    assert isinstance(ending, StreamEnding)
    last, usage, done = ending.events.split(b"\n\n")[:-1]
    assert json.loads(last[6:])["choices"][0]["finish_reason"] == "length"
    assert json.loads(usage[6:])["usage"] == {
        "prompt_tokens": 3,
        "total_tokens": 5,
        "completion_tokens": 2,
    }
    assert done == b"data: [DONE]"


def test_an_answer_that_is_finished_needs_no_engine() -> None:
    seen = see(("a", 21), finish_reason="stop")
    ending = plan_resumption(COMPLETIONS_PATH, read(stop=["x"], temperature=1), seen, 0)
    assert ending == StreamEnding(b"data: [DONE]\n\n")


def test_a_stream_without_output_is_simply_retried() -> None:
    seen = see(chat=True)
    assert resume(read(messages=MESSAGES, stop=["x"]), seen, CHAT_PATH).mode == "replayed"


def test_other_answers_are_not_resumed() -> None:
    with pytest.raises(NotResumableError):
        plan_resumption(b"/v1/messages", read(temperature=0), see(("a", 21)), 100)


@pytest.mark.parametrize(
    ("fields", "repeatable"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.0}, True),
        ({"top_k": 1}, True),
        ({"seed": 7, "temperature": 1}, True),
        ({"seed": None}, False),
        ({"temperature": 0.1}, False),
        ({}, False),
    ],
    ids=str,
)
def test_only_some_answers_come_twice(fields: dict[str, Any], repeatable: bool) -> None:
    assert is_repeatable(read(**fields).fields) is repeatable


def test_messages_that_are_nested_too_deeply_are_no_text() -> None:
    content = json.loads("[" * 400 + "]" * 400)
    chat = read(messages=[{"role": "user", "content": [{"type": "text", "more": content}]}])
    seen = see(("a", 1), chat=True)
    hows = []
    for frames in range(0, 700, 2):
        try:
            planned = at_depth(frames, lambda: plan_resumption(CHAT_PATH, chat, seen, 100))
        except NotResumableError:
            hows.append("refused")
        except RecursionError:
            break
        else:
            hows.append(planned.mode)
    assert set(hows) == {"continued", "refused"}
