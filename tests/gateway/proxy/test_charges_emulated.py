"""What clients get of engines' streams, and what it costs, with all that may be requested."""

import asyncio
import json
import random
from typing import Any

import aiohttp
import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KEY_START = "a-key-of-16-or-more-"
MINE = ("token_ids", "prompt_token_ids")
"""Members that vLLM writes as null to clients that did not request them."""
OWN = ("id", "created")
MESSAGES = [{"role": "user", "content": "tell me a story"}]


def draw(chance: random.Random, *, repeatable: bool = False) -> tuple[str, dict[str, Any]]:
    """(path, body) of a stream of any kind."""
    path = chance.choice([CHAT, COMPLETIONS])
    prompt = "tell me a story " * chance.randint(1, 20)
    body: dict[str, Any] = {"model": "m", "stream": True, "ignore_eos": True}
    body |= {"max_tokens": chance.choice([40, 90] if repeatable else [1, 2, 9, 40])}
    body |= (
        {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    )
    extras: dict[str, list[Any]] = {
        "n": [1, 1, 2, 3],
        "stream_interval": [1, 3, 16, 128],
        "return_token_ids": [True, False, None],
        "include_reasoning": [True] if path == COMPLETIONS else [True, False],
        "stop": [["zz"]],
        "seed": [4],
        "temperature": [0],
        "stream_options": [
            None,
            {},
            {"include_usage": True},
            {"continuous_usage_stats": True},
            {"include_usage": True, "continuous_usage_stats": True},
        ],
    }
    for key, values in extras.items():
        if chance.random() < 0.5:
            body[key] = chance.choice(values)
    if repeatable and body.get("n", 1) > 1:
        body["temperature"] = 0
    return path, body


def read(raw: bytes) -> list[Any]:
    """The events by choice, without what differs between any two answers."""
    *events, last = raw.removesuffix(b"\n\n").split(b"\n\n")
    assert last == b"data: [DONE]"
    return sorted((normalize(json.loads(event[6:])) for event in events), key=get_choice)


def normalize(value: Any) -> Any:
    if isinstance(value, list):
        return [normalize(each) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {key: normalize(each) for key, each in value.items() if key not in OWN}
    return {key: each for key, each in kept.items() if not (key in MINE and each is None)}


def get_choice(event: dict[str, Any]) -> int:
    """Choices interleave as the engine runs."""
    return event["choices"][0]["index"] if event["choices"] else 1 << 20


def count_tokens(body: dict[str, Any], prompt_tokens: int) -> int:
    return prompt_tokens + body.get("n", 1) * body["max_tokens"]


async def fetch(url: str, body: dict[str, Any]) -> bytes:
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 200
        return await response.read()


async def find_prompt_tokens(engine, path: str, body: dict[str, Any]) -> int:
    """As the engine counts them."""
    whole = {key: body[key] for key in ("model", "prompt", "messages") if key in body}
    answer = await fetch(engine.url + path, whole | {"max_tokens": 1})
    return json.loads(answer)["usage"]["prompt_tokens"]


async def make_tenants(make_fleet, tmp_path, roles: dict[str, str], count: int):
    """A fleet and so many tenants, with a token a second each."""
    keys = [{"name": f"t{n}", "keys": [f"{KEY_START}{n}"]} for n in range(count)]
    path = tmp_path / "keys.yaml"
    path.write_text(f"tenants: {json.dumps([key | {'tokensPerMinute': 60} for key in keys])}\n")
    return await make_fleet(roles, api_keys=path)


def bearer(number: int) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEY_START}{number}"}


def check_charge(stage, number: int, tokens: int, began: float) -> None:
    """`began`: when its request was sent; since then its tenant got a token a second back."""
    now = stage.context.clock()
    charged = stage.context.admission._usage_by_tenant[f"t{number}"]._token_bucket._full_at - now
    assert tokens - (now - began) - 0.01 <= charged <= tokens


async def test_clients_get_what_engines_send_them_and_pay_for_it(make_fleet, tmp_path) -> None:
    stage, engines = await make_tenants(make_fleet, tmp_path, {"x": "mixed"}, 40)
    engine, chance = engines["x"], random.Random(8)
    for number in range(40):
        path, body = draw(chance)
        expected = await fetch(engine.url + path, body)
        tokens = count_tokens(body, await find_prompt_tokens(engine, path, body))
        began = stage.context.clock()
        response = await stage.ask(body, path, **bearer(number))
        assert read(response.body) == read(expected), body
        check_charge(stage, number, tokens, began)
    await stage.until_idle()


@pytest.mark.parametrize("seed", range(2))
async def test_engines_that_are_lost_change_no_price(make_fleet, tmp_path, seed: int) -> None:
    roles = {"p": "prefill", **{f"d{number}": "decode" for number in range(4)}}
    stage, engines = await make_tenants(make_fleet, tmp_path, roles, 30)
    chance = random.Random(seed)
    sent = [draw(chance, repeatable=True) for _ in range(30)]
    counted = [await find_prompt_tokens(engines["d3"], *each) for each in sent]
    clients, began = [await stage.connect() for _ in sent], stage.context.clock()
    for number, (path, body) in enumerate(sent):
        clients[number].send(body, path, **bearer(number))

    async def disturb() -> None:
        while True:
            await asyncio.sleep(0.01)
            for name in ("d0", "d1", "d2"):
                engines[name].engine.faults.drop = chance.choice([None, None, 0, 1, 5, 11])

    disturbing = asyncio.create_task(disturb())
    responses = await asyncio.gather(*(client.read() for client in clients))
    disturbing.cancel()
    await stage.until_idle()
    whole = [
        number
        for number, response in enumerate(responses)
        if response.status == 200 and b'data: {"error"' not in response.body
    ]
    assert len(whole) > len(sent) / 2
    for number in whole:
        check_charge(stage, number, count_tokens(sent[number][1], counted[number]), began)
    assert sum(stage.context.metrics.recoveries.values()) > 3


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/responses", {"input": "tell me a story", "max_output_tokens": 40}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 40}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 40}),
    ],
    ids=["responses", "messages", "chat"],
)
async def test_every_api_has_the_same_price(make_fleet, tmp_path, path, fields, stream) -> None:
    stage, engines = await make_tenants(make_fleet, tmp_path, {"x": "mixed"}, 1)
    chat = {"model": "m", "messages": MESSAGES, "max_tokens": 40}
    usage = json.loads(await fetch(engines["x"].url + CHAT, chat))["usage"]
    began = stage.context.clock()
    body = {"model": "m", "stream": stream, **fields}
    response = await stage.ask(body, path, **bearer(0))
    assert response.status == 200
    await stage.until_idle()
    check_charge(stage, 0, usage["total_tokens"], began)
