"""Sixteen emulated instances on one machine, with the lengths of a real service."""

import asyncio
import json
import random
from collections.abc import Iterator

import aiohttp
import pytest

from e2e.support import azure_conversation
from e2e.support.deployments import Deployment, deployed, emulated, idle, until

REQUESTS = 500
IN_FLIGHT = 128
SEED = 20_231_116


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    manifest = emulated("fleet", prefill=12, decode=4, time_scale=0.05)
    with deployed(manifest, tmp_path_factory.mktemp("fleet"), 180) as deployment:
        yield deployment


@pytest.mark.timeout(600)
def test_five_hundred_streams_over_16_instances_none_lost_none_mixed_up(fleet: Deployment) -> None:
    rng = random.Random(SEED)
    # Each fourth prompt is sent twice: equal prompts must give equal answers wherever they run.
    numbers = [i - 1 if i % 4 == 3 else i for i in range(REQUESTS)]
    lengths = {
        number: (
            min(azure_conversation.draw(azure_conversation.PROMPT_TOKENS, rng), 7_000),
            azure_conversation.draw(azure_conversation.OUTPUT_TOKENS, rng),
        )
        for number in sorted(set(numbers))
    }
    answers = asyncio.run(ask_all(fleet, [(n, *lengths[n]) for n in numbers]))

    assert len(answers) == REQUESTS
    by_number: dict[int, str] = {}
    for number, text, tokens, usage in answers:
        assert tokens == usage == lengths[number][1], f"request {number} (seed {SEED})"
        assert by_number.setdefault(number, text) == text, f"request {number} got another's answer"
    assert len(set(by_number.values())) == len(by_number), "two prompts share an answer"
    until(lambda: idle(fleet), 30, "all KV is freed")


async def ask_all(
    fleet: Deployment, requests: list[tuple[int, int, int]]
) -> list[tuple[int, str, int, int]]:
    slots = asyncio.Semaphore(IN_FLIGHT)
    connector = aiohttp.TCPConnector(limit=IN_FLIGHT)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def ask(number: int, prompt_tokens: int, output_tokens: int):
            async with slots:
                return number, *await stream(session, fleet, number, prompt_tokens, output_tokens)

        return await asyncio.gather(*(ask(*request) for request in requests))


async def stream(
    session: aiohttp.ClientSession, fleet: Deployment, number: int, prompt: int, output: int
) -> tuple[str, int, int]:
    """Text, tokens counted as they came, and the engine's own count."""
    body = {
        "model": "fleet",
        "prompt": [number, *(random.Random(number).choices(range(1_000), k=prompt))],
        "max_tokens": output,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with session.post(f"{fleet.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        raw = await response.read()
    *events, done, rest = [e for e in raw.split(b"\n\n") if not e.startswith(b":")]
    assert (done, rest) == (b"data: [DONE]", b"")
    parsed = [json.loads(event.removeprefix(b"data: ")) for event in events]
    texts = [event["choices"][0]["text"] for event in parsed if event["choices"]]
    return "".join(texts), len(texts), parsed[-1]["usage"]["completion_tokens"]
