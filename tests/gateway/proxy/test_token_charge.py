"""A request is charged what its engine reports, and at most what it allows."""

import asyncio
import json
import time
from typing import Any

import pytest

from cleave.gateway.proxy.token_charge import (
    MIN_TOKEN_S,
    bound_prompt,
    bound_unseen,
    count_charged,
)
from cleave.rpc.v1 import agent_pb2

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


def test_a_prompt_that_no_engine_has_counted_has_a_token_for_each_four_bytes() -> None:
    url = "data:image/png;base64," + "word" * 10_000
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    chat = parse_completion(b"/v1/chat/completions", json.dumps(body).encode())
    assert chat.prompt_tokens < 1_100
    assert bound_prompt(chat) > 10_000
    assert bound_prompt(read(prompt="7" * 4_000)) == read(prompt="7" * 4_000).prompt_tokens > 4_000


KEY = {"Authorization": "Bearer secret-of-tenant-a"}
WHOLE = {"model": "m", "prompt": "hello", "n": 128, "max_tokens": 4_000}


@pytest.fixture
def charged_stage(make_stage, tmp_path):
    """Makes a stage whose tenant has 1,000 tokens a minute."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("tenants: [{name: a, keys: [secret-of-tenant-a], tokensPerMinute: 1000}]\n")

    def make(count: int, **options: Any):
        return make_stage({f"x{i}": "mixed" for i in range(count)}, api_keys=keys, **options)

    return make


def count_spent(stage) -> float:
    bucket = stage.context.admission._usage_by_tenant["a"]._token_bucket
    return (bucket._full_at - stage.context.clock()) * 1_000 / 60


async def hang(engine, request, writer) -> None:
    await asyncio.sleep(60)


def report_step(stage) -> None:
    for name in stage.engines:
        load = agent_pb2.LoadReport(boot_id=f"boot-{name}", sampled_ns=time.monotonic_ns())
        event = agent_pb2.WatchEvent(load=load)
        stage.context.router.registry.on_event(name, event, stage.context.clock())


async def test_an_answer_that_takes_too_long_is_computed_and_paid_once(charged_stage) -> None:
    stage = await charged_stage(3, response_s=0.5)
    for engine in stage.engines.values():
        engine.script = hang
    report_step(stage)
    response = await stage.ask(WHOLE, **KEY)
    assert (response.status, response.error["code"]) == (504, "engine_timeout")
    assert "stream it" in response.error["message"]
    assert sum(len(engine.requests) for engine in stage.engines.values()) == 1
    assert not stage.context.circuit_breaker.failure_states
    assert count_spent(stage) > 128 * 0.5 / MIN_TOKEN_S - 100


async def test_a_hung_engine_is_replaced_and_the_whole_answer_paid_once(charged_stage) -> None:
    stage = await charged_stage(2, response_s=0.5)
    stage.engines["x0"].script = hang
    response = await stage.ask({"model": "m", "prompt": "hello"}, **KEY)
    assert response.status == 200
    assert count_spent(stage) < 20


async def test_an_answer_that_is_too_large_is_paid(charged_stage) -> None:
    stage = await charged_stage(1, max_buffered_bytes=1 << 20, max_body_bytes=1 << 20)

    async def answer_much(engine, request, writer) -> None:
        await asyncio.sleep(0.2)
        engine.send_json(writer, {"choices": [{"text": "x" * (2 << 20)}]})

    stage.engines["x0"].script = answer_much
    response = await stage.ask(WHOLE, **KEY)
    assert (response.status, response.error["code"]) == (502, "engine_error")
    assert count_spent(stage) > 128 * 0.2 / MIN_TOKEN_S - 100


async def test_one_instance_cannot_make_the_tokens_of_a_model_free(charged_stage) -> None:
    stage = await charged_stage(2)

    async def answer(engine, request, writer) -> None:
        usage = {"prompt_tokens": 300, "completion_tokens": 500, "total_tokens": 800}
        choice = {"index": 0, "text": "x", "finish_reason": "stop"}
        engine.send_json(writer, {"choices": [choice], "usage": usage})

    for engine, length in zip(stage.engines.values(), (1, 8_192), strict=True):
        engine.script = answer
        stage.state(engine, max_model_len=length)
    await stage.ask({"model": "m", "prompt": "hello"}, **KEY)
    assert count_spent(stage) > 700
    assert stage.context.router.registry.find_max_model_len("m") == 1
