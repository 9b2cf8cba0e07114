"""Engines that fail as real ones do, seen through the gateway: no KV to pull, streams cut."""

import asyncio
import itertools
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest

from cleave.gateway.upstream import circuit_breaker
from cleave.policy.request_targets import RequestTargets
from cleave.rpc.v1 import agent_pb2
from cleave_worker.emulator import api_requests
from cleave_worker.emulator.sequence import Sequence

BLOCK_TOKENS = 16
NO_PORT = 1
"""A port without a listener."""
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PATHS = pytest.mark.parametrize("path", [CHAT, COMPLETIONS], ids=["chat", "completion"])
STREAM = {"model": "m", "stream": True, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture
async def fleet(make_fleet):
    """Two prefill and two decode engines."""
    return await make_fleet({"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"})


def ask(path: str, **fields: Any) -> dict[str, Any]:
    prompt = "tell me a story " * 20
    request = (
        {"messages": [{"role": "user", "content": prompt}]} if path == CHAT else {"prompt": prompt}
    )
    return STREAM | request | fields


def read(response) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """(text by choice, events) of a stream that came to its end."""
    assert response.status == 200
    *events, done = response.events
    assert done == b"data: [DONE]", events[-1]
    values = [json.loads(event.removeprefix(b"data: ")) for event in events]
    texts: dict[int, str] = {}
    for value in values:
        for choice in value["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts, values


async def read_rest(client) -> tuple[dict[int, str], list[dict[str, Any]]]:
    """The same of a stream whose head was read."""
    pieces = []
    while piece := await client.read_chunk():
        pieces.append(piece)
    events = b"".join(pieces).split(b"\n\n")[:-1]
    return read(SimpleNamespace(status=200, events=events))


async def ask_and_lose(fleet, body: dict[str, Any], path: str, tokens: int):
    """What a client reads whose decode engine is lost after so many tokens."""
    stage, engines = fleet
    for name in ("d1", "d2"):
        engines[name].engine.faults.drop = tokens
    client = await stage.connect()
    client.send(body, path)
    await stage.until(lambda: stage.context.metrics.retries[("decode", "lost")] > 0, "it is lost")
    for emulated in engines.values():
        emulated.engine.faults.clear()
    return read(await client.read())


@PATHS
@pytest.mark.parametrize("tokens", [1, 2, 9, 23])
async def test_a_stream_goes_on_elsewhere_and_the_client_sees_nothing(fleet, path, tokens) -> None:
    stage, _ = fleet
    body = ask(path, temperature=0.7, stream_options={"include_usage": True})
    expected, undisturbed = read(await stage.ask(body, path))
    texts, events = await ask_and_lose(fleet, body, path, tokens)
    assert texts == expected
    assert len({(event["id"], event["created"], event["object"]) for event in events}) == 1
    assert events[-1]["usage"] == undisturbed[-1]["usage"]
    assert events[0]["choices"][0].keys() == undisturbed[0]["choices"][0].keys()
    parts = [part for event in events for part in (event, *event["choices"])]
    assert not any(part.get("token_ids") or part.get("prompt_token_ids") for part in parts)
    assert sum(stage.context.metrics.recoveries.values()) >= 1
    assert {how for _, how in stage.context.metrics.recoveries} == {"continued"}
    assert stage.context.metrics.requests == {("m", "ok"): 2}
    await stage.until_idle()


@PATHS
@pytest.mark.parametrize("how", ["continued", "replayed"])
async def test_both_halves_of_a_stream_say_that_it_was_created_at_the_same_time(
    fleet, path, how, monkeypatch
) -> None:
    seconds = itertools.count(1_000)
    clock = SimpleNamespace(time=lambda: float(next(seconds)))
    monkeypatch.setattr(api_requests, "time", clock)  # Each request gets a second of its own.
    stage, _ = fleet
    sampling = {"temperature": 0.7} if how == "continued" else {"temperature": 0, "logprobs": True}
    if path == COMPLETIONS and how == "replayed":
        sampling["logprobs"] = 1
    _, events = await ask_and_lose(fleet, ask(path, **sampling), path, 9)
    assert {mode for _, mode in stage.context.metrics.recoveries} == {how}
    assert len({event["created"] for event in events}) == 1


@PATHS
@pytest.mark.parametrize("tokens", [0, 1, 9])
async def test_a_client_that_asks_for_ids_gets_each_of_them_once(fleet, path, tokens) -> None:
    stage, _ = fleet
    body = ask(path, temperature=0.7, return_token_ids=True)

    def ids_of(events: list[dict[str, Any]]) -> tuple[list[int], list[list[int]]]:
        choices = [choice for event in events for choice in event["choices"]]
        prompts = [part.get("prompt_token_ids") for part in (*events, *choices)]
        token_ids = [number for choice in choices for number in choice.get("token_ids") or ()]
        return token_ids, [prompt for prompt in prompts if prompt]

    _, undisturbed = read(await stage.ask(body, path))
    _, events = await ask_and_lose(fleet, body, path, tokens)
    assert ids_of(events) == ids_of(undisturbed)
    assert [len(each) > 0 for each in ids_of(events)] == [True, True]
    assert {how for _, how in stage.context.metrics.recoveries} <= {"continued"}


@PATHS
async def test_the_rest_of_an_answer_is_not_generated_twice(fleet, path) -> None:
    stage, engines = fleet
    engines["d1"].engine.faults.drop = 20
    read(await stage.ask(ask(path, temperature=0.7), path))
    num_generated = engines["d2"].engine.metrics.generation_tokens
    assert num_generated == STREAM["max_tokens"] - 20


@PATHS
async def test_a_stream_that_goes_on_is_not_computed_anew_where_its_prompt_was(fleet, path) -> None:
    stage, engines = fleet
    engines["d1"].engine.faults.drop = 20
    read(await stage.ask(ask(path), path))
    sources = [engines[name].engine.metrics.prompt_tokens_by_source for name in ("p1", "p2")]
    prompt = sum(engines["d1"].engine.metrics.prompt_tokens_by_source.values())
    computed = sum(each["local_compute"] for each in sources)
    assert 0 < computed - prompt <= 20 + BLOCK_TOKENS
    assert sorted(bool(sum(each.values())) for each in sources) == [False, True]


@PATHS
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0, "logprobs": True, "top_logprobs": 1},
        {"temperature": 0.7, "seed": 7},
        {"temperature": 0, "n": 3},
        {"temperature": 0.7, "seed": 7, "n": 2},
        {"temperature": 0, "stop": ["never said"]},
        {"temperature": 0, "tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
    ids=str,
)
async def test_what_hangs_on_its_engine_is_replayed(fleet, path, fields) -> None:
    stage, _ = fleet
    body = ask(path, stream_options={"include_usage": True}, **fields)
    if path == COMPLETIONS and "logprobs" in fields:
        body |= {"logprobs": 1, "top_logprobs": None}
    expected, undisturbed = read(await stage.ask(body, path))
    texts, events = await ask_and_lose(fleet, body, path, 10)
    assert texts == expected
    assert len(set(expected.values())) == fields.get("n", 1), "each choice is another"
    assert events[-1]["usage"] == undisturbed[-1]["usage"]
    assert [e["choices"][0].get("logprobs") for e in events[:-1] if e["choices"]] == [
        e["choices"][0].get("logprobs") for e in undisturbed[:-1] if e["choices"]
    ]
    # Completions of texts have no tools: engines do not get them.
    mode = "continued" if path == COMPLETIONS and "tools" in fields else "replayed"
    assert {how for _, how in stage.context.metrics.recoveries} == {mode}
    await stage.until_idle()


async def test_what_cannot_be_resumed_says_why_and_what_would_help(fleet) -> None:
    stage, engines = fleet
    for name in ("d1", "d2"):
        engines[name].engine.faults.drop = 5
    response = await stage.ask(ask(CHAT, temperature=0.7, n=2), CHAT)
    error = json.loads(response.events[-1].removeprefix(b"data: "))["error"]
    assert "temperature 0 or a seed" in error["message"]
    assert stage.context.metrics.requests == {("m", "broken"): 1}
    await stage.until_idle()


@PATHS
async def test_a_stream_outlives_many_engines(make_fleet, path) -> None:
    roles = {"p": "prefill", **{f"d{i}": "decode" for i in range(6)}}
    stage, engines = await make_fleet(roles)
    expected, _ = read(await stage.ask(ask(path, max_tokens=40), path))
    for number in range(6):
        engines[f"d{number}"].engine.faults.drop = None if number == 5 else 3 + number
    texts, _ = read(await stage.ask(ask(path, max_tokens=40), path))
    assert texts == expected
    await stage.until_idle()


async def test_the_rest_of_a_stream_has_no_target_for_its_first_token(make_fleet) -> None:
    stage, engines = await make_fleet(
        {"a": "mixed", "b": "mixed"}, sends_targets=True, ttft_slo_ms=1_000.0, tpot_slo_ms=50.0
    )
    sequences, submitted = [], Sequence.__init__

    def record(sequence, request, *more):
        sequences.append(request.targets)
        submitted(sequence, request, *more)

    for each in engines.values():
        each.engine.faults.drop = 7
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sequence, "__init__", record)
        client = await stage.connect()
        client.send(ask(CHAT), CHAT)
        await stage.until(lambda: len(sequences) > 1, "it goes on elsewhere")
        for each in engines.values():
            each.engine.faults.clear()
        await client.read()
    assert sequences[0].ttft_left_ms <= 1_000
    assert sequences[1] == RequestTargets(tpot_ms=50.0)


async def test_a_stream_waits_for_an_instance_that_can_go_on(make_fleet) -> None:
    stage, engines = await make_fleet({"x": "mixed"})
    expected, _ = read(await stage.ask(ask(CHAT), CHAT))
    engines["x"].engine.faults.drop = 7
    client = await stage.connect()
    client.send(ask(CHAT), CHAT)
    await stage.until(lambda: stage.context.metrics.retries[("decode", "lost")] > 0, "it is lost")
    engines["x"].engine.faults.clear()
    texts, _ = read(await client.read())
    assert texts == expected
    await stage.until_idle()


async def test_it_does_not_wait_for_ever(make_fleet) -> None:
    stage, engines = await make_fleet({"x": "mixed"}, resume_s=0.5)
    engines["x"].engine.faults.drop = 7
    client = await stage.connect()
    client.send(ask(CHAT), CHAT)
    await stage.until(lambda: stage.context.metrics.retries["decode", "lost"] > 0, "it is lost")
    stage.state(stage.engines["x"], engine_url=engines["x"].url, state=agent_pb2.STATE_DRAINING)
    response = await client.read()
    error = json.loads(response.events[-1].removeprefix(b"data: "))["error"]
    assert "instance x closed the connection" in error["message"]
    await stage.until_idle()


async def test_an_engine_that_stops_moving_is_left(make_fleet, monkeypatch) -> None:
    monkeypatch.setattr(circuit_breaker, "MIN_STALL_TIMEOUT_S", 0.5)
    # On a busy machine the rest of the stream takes seconds.
    monkeypatch.setattr(circuit_breaker, "MIN_SUSPECT_S", circuit_breaker.MAX_SUSPECT_S)
    stage, engines = await make_fleet({"a": "mixed", "b": "mixed"})
    expected, _ = read(await stage.ask(ask(CHAT, max_tokens=400), CHAT))
    client = await stage.connect()
    client.send(ask(CHAT, max_tokens=400), CHAT)
    await client.read_head()
    running = next(e for e in engines.values() if e.engine.num_requests)
    running.engine.faults.apply(b'{"hang": true}')
    for request in stage.context.active_requests:
        request._attempt.stall_detector.longest_pause_s = 0.01
    texts, _ = await read_rest(client)
    assert texts == expected
    assert stage.context.metrics.retries[("decode", "stall")] == 1
    assert len(stage.context.circuit_breaker.list_suspects(stage.context.clock())) == 1
    running.engine.faults.clear()
    await stage.until_idle()


@pytest.fixture
async def report_steps():
    """Sends what engines report of their steps, as their agents do."""
    tasks = []

    def begin(stage, engines) -> None:
        async def report() -> None:
            while True:
                for name, emulated in engines.items():
                    ns = emulated.engine._build_load().sampled_ns
                    load = agent_pb2.LoadReport(boot_id=f"boot-{name}", sampled_ns=ns)
                    event = agent_pb2.WatchEvent(load=load)
                    stage.context.router.registry.on_event(name, event, stage.context.clock())
                await asyncio.sleep(0.05)

        tasks.append(asyncio.create_task(report()))

    yield begin
    for task in tasks:
        task.cancel()


@pytest.mark.interpreted
async def test_a_stream_with_many_tokens_an_event_is_silent_and_not_hung(
    make_fleet, report_steps, monkeypatch
) -> None:
    """A slow engine computes prompts between the tokens, and 100 of them make an event."""
    monkeypatch.setattr(circuit_breaker, "MIN_STALL_TIMEOUT_S", 0.5)
    stage, engines = await make_fleet({"a": "mixed", "b": "mixed"}, time_scale=1.0, idle_s=0.5)
    report_steps(stage, engines)
    body = ask(CHAT, max_tokens=120, stream_interval=100_000, seed=1)
    client = await stage.connect()
    client.send(body, CHAT)
    await client.read_head()
    begun = stage.context.clock()
    (request,) = stage.context.active_requests
    request._attempt.stall_detector.longest_pause_s = 0.01
    prompts = [await stage.connect() for _ in range(4)]
    for number, other in enumerate(prompts):
        prompt = [300 + (number * 7 + at) % 90 for at in range(1_500)]
        other.send({"model": "m", "prompt": prompt, "max_tokens": 1}, COMPLETIONS)
    texts, values = await read_rest(client)
    assert stage.context.clock() - begun > 1.5, "the engine is too fast for this test"
    assert (len(texts[0].split()), len(values)) == (120, 3)
    assert not stage.context.metrics.retries
    for other in prompts:
        assert (await other.read()).status == 200
    await stage.until_idle()


@pytest.mark.interpreted
async def test_an_engine_that_reports_no_steps_is_hung_also_if_its_streams_are_slow(
    make_fleet, report_steps, monkeypatch
) -> None:
    monkeypatch.setattr(circuit_breaker, "MIN_STALL_TIMEOUT_S", 0.5)
    stage, engines = await make_fleet({"a": "mixed", "b": "mixed"}, time_scale=0.5)
    report_steps(stage, engines)
    client = await stage.connect()
    client.send(ask(CHAT, max_tokens=120, stream_interval=50), CHAT)
    await client.read_head()
    running = next(e for e in engines.values() if e.engine.num_requests)
    (request,) = stage.context.active_requests
    request._attempt.stall_detector.longest_pause_s = 0.01
    # It stays silent for long while it works; that makes it no slower to be found.
    await asyncio.sleep(1.0)
    running.engine.faults.apply(b'{"hang": true}')
    others = [await stage.connect() for _ in range(3)]
    for other in others:
        other.send(ask(CHAT), CHAT)
    begun = stage.context.clock()
    await stage.until(
        lambda: stage.context.metrics.retries[("decode", "stall")] > 0, "it counts as hung"
    )
    assert stage.context.clock() - begun < 5
    texts, _ = await read_rest(client)
    assert len(texts[0].split()) == 120
    running.engine.faults.clear()
    for other in others:
        assert (await other.read()).status == 200
    await stage.until_idle()


async def test_streams_stay_exact_while_engines_fail_at_random(make_fleet) -> None:
    """Many streams of all kinds, each decode engine cut again and again."""
    roles = {"p1": "prefill", "p2": "prefill", **{f"d{i}": "decode" for i in range(4)}}
    stage, engines = await make_fleet(roles)
    kinds = [
        (CHAT, {}),
        (COMPLETIONS, {}),
        (CHAT, {"temperature": 0, "n": 2}),
        (COMPLETIONS, {"temperature": 1, "seed": 3}),
        (CHAT, {"temperature": 0, "stop": ["zz"]}),
    ]
    expected = [read(await stage.ask(ask(path, **more), path))[0] for path, more in kinds]
    chance = random.Random(5)
    clients = []
    for number in range(40):
        client = await stage.connect()
        path, more = kinds[number % len(kinds)]
        client.send(ask(path, **more), path)
        clients.append(client)

    async def disturb() -> None:
        while True:
            await asyncio.sleep(0.01)
            for name in ("d0", "d1", "d2"):
                drop = chance.choice([None, None, 0, 1, 5, 11])
                engines[name].engine.faults.drop = drop

    disturbing = asyncio.create_task(disturb())
    responses = await asyncio.gather(*(client.read() for client in clients))
    disturbing.cancel()
    for number, response in enumerate(responses):
        assert read(response)[0] == expected[number % len(kinds)], number
    await stage.until_idle()


@pytest.fixture
async def decode_url(emulate) -> str:
    """An emulated engine."""
    return (await emulate("boot-d")).url


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "completion"])
async def test_kv_that_is_gone_is_computed_anew_and_the_client_sees_nothing(
    pair, decode_url, stream, chat
) -> None:
    async def offer_what_is_gone(engine, request, writer):
        handoff = engine.handoff() | {
            "remote_block_ids": [list(range(20))],
            "remote_port": NO_PORT,
            "remote_num_tokens": 200,
        }
        engine.send_json(writer, engine.prefill_answer() | {"kv_transfer_params": handoff})

    prompt = "word " * 100
    fields = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    pair.engines["p"].script = offer_what_is_gone
    pair.state(pair.engines["d"], engine_url=decode_url)
    path = "/v1/chat/completions" if chat else "/v1/completions"
    response = await pair.ask({"model": "m", "max_tokens": 4, "stream": stream} | fields, path)
    assert response.status == 200
    assert b"error" not in response.body
    assert pair.context.metrics.retries == {("decode", "status"): 1}
    assert pair.context.metrics.requests == {("m", "ok"): 1}
    await pair.until_idle()
