"""What the gateway requests of a stream for itself, so that every token counts."""

import json
from typing import Any

import pytest

from cleave.gateway.http import stream_fields
from cleave.gateway.http.errors import GatewayError
from cleave.gateway.http.stream_fields import MAX_INTERVAL, MAX_REPORTED_PROMPT, TokenReport
from cleave.gateway.proxy.event_splitter import MAX_PROMPT_IDS_BYTES

from tests.support.completions import build_colocated_body, parse_completion

BOTH = {"include_usage": True, "continuous_usage_stats": True}


def read(**fields: Any) -> tuple[TokenReport, dict[str, Any]]:
    body = {"model": "m", "prompt": "a", "stream": True, **fields}
    path = b"/v1/completions"
    if "messages" in fields:
        del body["prompt"]
        path = b"/v1/chat/completions"
    completion = parse_completion(path, json.dumps(body).encode())
    assert completion.report is not None
    return completion.report, json.loads(build_colocated_body(completion))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 1},
        {"tools": [{"type": "function"}], "messages": [{"role": "user", "content": "a"}]},
        {"stop": ["x"], "seed": 1, "logprobs": 5, "echo": False},
        {"echo": None},
        {"return_token_ids": None},
        {"include_reasoning": True, "messages": [{"role": "user", "content": "a"}]},
        {"stream_options": None},
    ],
    ids=str,
)
def test_one_choice_is_counted_by_ids_of_tokens(fields: dict[str, Any]) -> None:
    report, body = read(**fields)
    assert (report.has_ids, report.shows_ids, report.shows_usage) == (True, False, False)
    assert body["return_token_ids"] is True
    assert body.get("stream_options") is None


@pytest.mark.parametrize(
    ("fields", "choices", "prompts"),
    [
        ({"n": 3}, 3, 1),
        ({"prompt": ["a", "b"]}, 2, 2),
        ({"prompt": [[1], [2]], "n": 4}, 8, 2),
        ({"include_reasoning": False, "messages": [{"role": "user", "content": "a"}]}, 1, 1),
        ({"return_token_ids": "maybe"}, 1, 1),
        ({"echo": True}, 1, 1),
        ({"echo": 1, "return_token_ids": True}, 1, 1),
    ],
    ids=str,
)
def test_anything_else_is_counted_by_running_usage(fields, choices: int, prompts: int) -> None:
    report, body = read(**fields)
    assert (report.has_ids, report.num_choices, report.num_prompts) == (False, choices, prompts)
    assert body["stream_options"] == BOTH
    assert body.get("return_token_ids") == fields.get("return_token_ids")


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, (False, False)),
        ({"include_usage": False}, (False, False)),
        ({"include_usage": True}, (True, False)),
        ({"continuous_usage_stats": True}, (False, False)),
        ({"include_usage": True, "continuous_usage_stats": True, "x": 1}, (True, True)),
    ],
    ids=str,
)
def test_what_the_client_requested_stays(options: dict[str, Any], shown) -> None:
    for fields in ({"n": 2}, {}):
        report, body = read(**fields, stream_options=options)
        assert (report.shows_usage, report.shows_running_usage) == shown
        assert body["stream_options"] == (options | BOTH if fields else options)


def test_an_answer_that_is_not_streamed_is_requested_as_it_is() -> None:
    report, body = read(stream=False, n=3)
    assert report.num_choices == 3
    assert body.keys() == {"model", "prompt", "stream", "n"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": "2"}, "n"),
        ({"n": 1.5}, "n"),
        ({"stream_interval": "1000"}, "stream_interval"),
        ({"stream_interval": 1e9 + 0.5}, "stream_interval"),
        ({"stream_interval": [1]}, "stream_interval"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": "a"}, "stream_options"),
        ({"stream_options": {"include_usage": 1}}, "stream_options"),
        ({"stream_options": {"include_usage": "true"}}, "stream_options"),
        ({"stream_options": {"x": "a" * 2_000}}, "stream_options"),
    ],
    ids=str,
)
def test_values_of_other_types_are_refused_with_their_name(fields, param: str) -> None:
    with pytest.raises(GatewayError, match=param) as refused:
        read(**fields)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("sent", "passed"),
    [(None, None), (1, 1), (MAX_INTERVAL, MAX_INTERVAL), (100_000, MAX_INTERVAL), (0, 0), (-5, -5)],
)
@pytest.mark.parametrize("stream", [True, False])
def test_an_event_waits_for_a_limited_number_of_tokens(sent, passed, stream: bool) -> None:
    report, body = read(stream_interval=sent, stream=stream)
    assert body["stream_interval"] == passed
    assert not stream or report.interval == max(passed or 1, 1)


def test_ids_of_a_prompt_that_fit_no_event_are_not_requested() -> None:
    assert MAX_REPORTED_PROMPT * 7 * 1.4 < MAX_PROMPT_IDS_BYTES
    for extra in ({}, {"stop": ["x"]}, {"n": 1}):
        report, _ = read(prompt=[9] * MAX_REPORTED_PROMPT, **extra)
        assert report.has_ids
        report, sent = read(prompt=[9] * (MAX_REPORTED_PROMPT + 1), **extra)
        assert not report.has_ids
        assert (sent["stream_options"], report.shows_usage) == (BOTH, False)
    report, _ = read(prompt=[9] * (MAX_REPORTED_PROMPT + 1), return_token_ids=True)
    assert report.has_ids


@pytest.mark.interpreted
@pytest.mark.parametrize("key", ["n", "stream_interval"])
def test_a_number_of_many_digits_is_refused_before_it_is_decoded(key: str, monkeypatch) -> None:
    decoded: list[int] = []
    monkeypatch.setattr(stream_fields, "_decode_int", lambda raw: decoded.append(len(raw)) or 1)
    for digits in ("1" * 33, "1" * 300_000, "1e" + "9" * 300_000):
        body = b'{"model":"m","prompt":"a","%b":%b}' % (key.encode(), digits.encode())
        with pytest.raises(GatewayError, match=f"{key} must be an integer"):
            parse_completion(b"/v1/completions", body)
    assert decoded == []
