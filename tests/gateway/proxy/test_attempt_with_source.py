"""Turns of conversations through a gateway before emulated engines: they pull the last turn's KV,
and say what one engine alone would say, also when the source fails."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import aiohttp
import pytest

from cleave.rpc.v1 import agent_pb2

ROLES = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
OUTPUT_TOKENS = 60


@pytest.fixture
def converse(make_fleet, emulate):
    """A fleet whose caches can be pulled from, and a function that holds a conversation."""

    async def make():
        stage, engines = await make_fleet(ROLES)
        for name, each in engines.items():
            stage.state(
                stage.engines[name],
                engine_url=each.url,
                max_model_len=2048,
                kv_block_size=16,
                kv_blocks_total=1_000,
                prefix_port=each.engine.side_channel._port,
                kv_path=agent_pb2.KvPath(verified=True, token_ms=0.001),
            )
        reference = await stage_reference(emulate)
        return stage, engines, reference

    return make


async def stage_reference(emulate) -> Callable[[str], Awaitable[str]]:
    """Computes an answer on an engine that is no part of the fleet."""
    alone = await emulate("boot-alone")

    async def compute(prompt: str) -> str:
        async with aiohttp.ClientSession() as session:
            body = build_body(prompt)
            async with session.post(f"{alone.url}/v1/completions", json=body) as response:
                answer = await response.json()
        return answer["choices"][0]["text"]

    return compute


def build_body(prompt: str) -> dict[str, object]:
    return {"model": "m", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}


def make_words(number: int, count: int) -> str:
    draw = random.Random(number)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return " ".join("".join(draw.choices(letters, k=6)) for _ in range(count))


def count_pulled(engines) -> int:
    """Prompt tokens that prefill engines have pulled."""
    pulled = 0
    for name in ("p1", "p2"):
        sources = engines[name].engine.metrics.prompt_tokens_by_source
        pulled += int(sources["external_kv_transfer"])
    return pulled


async def run_turns(stage, reference, turns: int, between: Callable | None = None) -> None:
    """A conversation of which each answer is that of one engine alone."""
    prompt = make_words(0, 250)
    for turn in range(turns):
        response = await stage.ask(build_body(prompt))
        assert response.status == 200, response.body
        answer = response.json()["choices"][0]["text"]
        assert answer == await reference(prompt)
        prompt += answer + " " + make_words(turn + 1, 40)
        if between is not None:
            await between(turn)
    await stage.until_idle()


async def test_turns_pull_answers_from_decode_engines_and_say_the_same(converse) -> None:
    stage, engines, reference = await converse()
    await run_turns(stage, reference, 5)
    # Each turn but the first pulls the answer before it: of 60 tokens all full blocks.
    assert count_pulled(engines) >= 4 * 32
    assert all(each.engine.metrics.failed_transfers == 0 for each in engines.values())


async def test_turns_are_the_same_where_the_source_no_longer_has_them(converse) -> None:
    stage, engines, reference = await converse()

    async def forget(_: int) -> None:
        for name in ("d1", "d2"):
            pool = engines[name].engine.scheduler.pool
            pool.free(pool.allocate(pool.num_free))

    await run_turns(stage, reference, 4, forget)
    assert count_pulled(engines) == 0


async def test_turns_are_the_same_where_another_boot_runs_at_the_sources_port(converse) -> None:
    stage, engines, reference = await converse()

    async def restart(_: int) -> None:
        for name in ("d1", "d2"):
            channel = engines[name].engine.side_channel
            other = f"{channel.config.engine_id}+"
            object.__setattr__(channel.config, "engine_id", other)

    await run_turns(stage, reference, 2, restart)
    assert count_pulled(engines) == 0
    assert sum(engines[name].engine.metrics.failed_transfers for name in ("p1", "p2")) > 0


async def test_turns_are_the_same_where_the_sources_port_is_closed(converse) -> None:
    stage, engines, reference = await converse()

    async def close(_: int) -> None:
        for name in ("d1", "d2"):
            engines[name].engine.side_channel._server.close()

    await run_turns(stage, reference, 3, close)
    assert count_pulled(engines) == 0
    assert sum(engines[name].engine.metrics.failed_transfers for name in ("p1", "p2")) > 0


async def test_damaged_prefixes_change_no_answer(converse) -> None:
    stage, engines, reference = await converse()

    async def damage(_: int) -> None:
        for name in ("d1", "d2"):
            engines[name].engine.faults.apply(b'{"corrupt_handoff": 1}')

    await run_turns(stage, reference, 4, damage)
    assert sum(engines[name].engine.metrics.corrupt_transfers for name in ("p1", "p2")) > 0


async def test_two_conversations_at_once_pull_from_each_others_engines(converse) -> None:
    stage, engines, reference = await converse()
    stem = make_words(99, 250)
    prompts = [f"{stem} {make_words(each, 20)}" for each in range(12)]
    await stage.ask(build_body(stem))
    answers = await asyncio.gather(*(stage.ask(build_body(prompt)) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.json()["choices"][0]["text"] == await reference(prompt)
    assert count_pulled(engines) > 0
    await stage.until_idle()


async def test_a_client_cannot_name_a_source(converse) -> None:
    stage, engines, reference = await converse()
    place = {"engine_id": "boot-d1", "host": "127.0.0.1", "port": 9}
    params = {"kv_transfer_params": {"do_remote_decode": True, "prefix_source": place}}
    prompt = make_words(0, 100)
    response = await stage.ask(build_body(prompt) | params)
    assert response.json()["choices"][0]["text"] == await reference(prompt)
    assert all(each.engine.metrics.failed_transfers == 0 for each in engines.values())
