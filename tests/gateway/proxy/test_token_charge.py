"""A request is charged what its engine reports, and at most what it allows."""

import json
from typing import Any

import pytest

from cleave.gateway.proxy.token_charge import MIN_TOKEN_S, bound_unseen, count_charged

from tests.support.completions import parse_completion, parse_engine_request


def read(**fields: Any):
    body = json.dumps({"model": "m", "prompt": "a", **fields}).encode()
    return parse_completion(b"/v1/completions", body)


@pytest.mark.parametrize(
    ("fields", "prompt", "output", "charged"),
    [
        ({"max_tokens": 100}, 7, 90, 97),
        ({"max_tokens": 100}, 7, 10**12, 107),
        ({"max_tokens": 100, "n": 3}, 7, 10**12, 307),
        ({"max_tokens": 100}, 10**12, 5, 1_005),
        ({}, 7, 10**12, 1_007),
        ({"prompt": ["a", "b"]}, 10**12, 10**12, 4_000),
    ],
)
def test_an_engine_cannot_charge_more_than_was_requested(fields, prompt, output, charged) -> None:
    assert count_charged(read(**fields), prompt, output, 1_000) == charged


def test_other_requests_have_any_number_of_tokens() -> None:
    embedding = parse_engine_request(b"/v1/embeddings", b'{"model":"m","input":["a","b"]}', "")
    assert count_charged(embedding, 5_000, 0, 1_000) == 5_000
    assert bound_unseen(embedding, 10.0, is_streamed=False) == 0


def test_a_client_that_leaves_pays_what_its_engine_may_have_generated() -> None:
    whole = read(n=2)
    assert bound_unseen(whole, 10 * MIN_TOKEN_S, is_streamed=False) == 20
    assert bound_unseen(read(stream=True), 0.0, is_streamed=True) == 0
    assert bound_unseen(read(stream=True, stream_interval=50), 0.0, is_streamed=True) == 49
    assert bound_unseen(read(stream=True), 4 * MIN_TOKEN_S, is_streamed=True) == 4
