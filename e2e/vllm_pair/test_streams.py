"""Streams of vLLM through the gateway are those of the engine, and their tokens are counted."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from e2e.support.deployments import Deployment
from e2e.support.engine_keys import headers_for
from e2e.support.vllm_prompts import TIMEOUT_S, engine_url, metric

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
TOKENS = 12
PROMPT = "Which river runs under the old stone bridge BCDFG? " * 4
GREEDY = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
OUTPUT_TOKENS = 'cleave_gateway_output_tokens_total{model="tiny"}'
BOTH = {"include_usage": True, "continuous_usage_stats": True}
HIDDEN = ("token_ids", "prompt_token_ids")
"""vLLM writes these as null where they were not requested, the gateway not at all."""


def read(url: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a stream."""
    answer = httpx.post(url + path, json=body, headers=headers_for(url), timeout=TIMEOUT_S)
    assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-500:]
    for event in answer.text.split("\n\n")[:-2]:
        if not event.startswith(":"):
            yield json.loads(event.removeprefix("data: "))


def summarize(events: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """All that they say, however it is divided into events."""
    seen: dict[str, Any] = {"keys": set()}
    for event in events:
        for key, value in event.items():
            if key == "choices" or (key in HIDDEN and value is None):
                continue
            seen["keys"].add(key)
            if key == "usage" and not event["choices"]:
                seen["usage"] = value
            elif key == "usage":
                seen["running"] = value
        for choice in event["choices"]:
            walk(choice, (choice["index"],), seen)
    return seen


def walk(value: Any, path: tuple[Any, ...], seen: dict[Any, Any]) -> None:
    """Add texts and lists together, by their path."""
    if isinstance(value, dict):
        for key, each in value.items():
            if not (key in HIDDEN and each is None):
                walk(each, (*path, key), seen)
    elif isinstance(value, str | list):
        seen[path] = (seen.get(path) or type(value)()) + value
    else:
        seen[path] = seen.get(path) or value


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream_interval": 1_000_000},
        {"return_token_ids": True},
        {"stream_options": {"include_usage": True}},
        {"stream_options": BOTH, "stream_interval": 7},
        {"n": 3, "temperature": 1, "seed": 5},
        {"n": 2, "temperature": 1, "seed": 5, "stream_options": BOTH, "return_token_ids": True},
        {"echo": True},
        {"echo": True, "return_token_ids": True},
        {"stop": ["Q Q Q Q"], "logprobs": True},
    ],
    ids=str,
)
def test_a_stream_is_that_of_its_engine_and_counted(
    vllm_pair: Deployment, path: str, fields: dict[str, Any]
) -> None:
    is_chat = "chat" in path
    prompt = {"messages": [{"role": "user", "content": PROMPT}]} if is_chat else {"prompt": PROMPT}
    body = GREEDY | prompt | {"stream": True} | fields
    expected = summarize(read(engine_url(vllm_pair, "decode"), path, body))
    before = metric(vllm_pair.url, OUTPUT_TOKENS)
    found = summarize(read(vllm_pair.url, path, body))
    fingerprints = "keys"
    if body.get("n", 1) > 1 or "echo" in fields:
        # Its place is the last event, which is the usage that the gateway requested for itself.
        expected[fingerprints] -= {"system_fingerprint"}
        found[fingerprints] -= {"system_fingerprint"}
    assert found == expected
    assert metric(vllm_pair.url, OUTPUT_TOKENS) - before == TOKENS * body.get("n", 1)
