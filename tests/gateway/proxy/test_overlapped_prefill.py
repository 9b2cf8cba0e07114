"""Prefill and decode engine called at once: what each gets, and the effect of each loss."""

import asyncio
import json

import pytest

from cleave.rpc.engine_key import compute_kv_key
from cleave.rpc.v1 import agent_pb2

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}


def offer(stage, *, from_tokens: int = 1, free: int = 100, waiting: int = 0) -> None:
    """Engines whose KV can be followed, with so much room at the decode engine."""
    for engine in stage.engines.values():
        stage.state(engine, kv_port=5601, ahead_from_tokens=from_tokens, kv_block_size=16)
        load = agent_pb2.LoadReport(
            boot_id=engine.boot_id, kv_blocks_free=free, num_waiting=waiting, sampled_ns=1
        )
        registry = stage.context.router.registry
        registry.on_event(engine.name, agent_pb2.WatchEvent(load=load), 1e12)


@pytest.fixture
def ahead(pair):
    offer(pair)
    return pair


def gate(engine) -> asyncio.Event:
    """The engine answers once this is set."""
    opened = asyncio.Event()

    async def wait(engine, request, writer):
        await opened.wait()
        await engine.answer(request, writer)

    engine.script = wait
    return opened


async def test_both_engines_are_called_at_once_with_one_request_id(ahead) -> None:
    opened = gate(ahead.engines["p"])
    asking = asyncio.create_task(ahead.ask(ASK | {"stream": True}))
    prefill, decode = ahead.engines["p"], ahead.engines["d"]
    await ahead.until(lambda: prefill.requests and decode.requests, "both are asked")
    first, second = (e.requests[0].body["kv_transfer_params"] for e in (prefill, decode))
    name = prefill.requests[0].headers["x-request-id"]
    assert (first["do_remote_decode"], first["cleave"]) == (True, {"name": name})
    assert second["do_remote_prefill"]
    assert (second["remote_engine_id"], second["remote_request_id"]) == (prefill.boot_id, name)
    assert second["cleave"] == {
        "boot_id": prefill.boot_id,
        "request_id": name,
        "epoch": 0,
        "prompt_digest": "",
        "num_tokens": 0,
        "addresses": [["127.0.0.1", 5601]],
        "key": compute_kv_key(prefill.key),
    }
    opened.set()
    assert (await asking).events[-1] == b"data: [DONE]"
    await ahead.until_idle()


@pytest.mark.parametrize("stream", [True, False])
async def test_the_answer_is_the_decode_engines_whichever_comes_first(ahead, stream) -> None:
    engines = ahead.engines.values()
    for number, late in enumerate(("p", "d"), start=1):
        opened = gate(ahead.engines[late])
        asking = asyncio.create_task(ahead.ask(ASK | {"stream": stream}))
        # Neither answer may come before both are called.
        await ahead.until(
            lambda number=number: {len(engine.requests) for engine in engines} == {number},
            "both are asked",
        )
        opened.set()
        response = await asking
        assert response.status == 200
        assert b"kv_transfer_params" not in response.body
        await ahead.until_idle()
        ahead.engines[late].script = None
    assert {len(engine.requests) for engine in engines} == {2}


async def test_an_overlapped_prefill_is_counted_at_its_handoff(ahead) -> None:
    opened = gate(ahead.engines["d"])
    asking = asyncio.create_task(ahead.ask(ASK))
    await ahead.until(lambda: ahead.context.metrics.handoffs == {"ahead": 1}, "it is counted")
    assert ahead.context.router.registry.instances["p"].in_flight.prompt.own == 0
    opened.set()
    assert (await asking).status == 200


def count_cached(tokens: int) -> dict:
    counts = {"prompt_tokens": 7, "total_tokens": 10, "completion_tokens": 3}
    details = {"cached_tokens": tokens, "multimodal_tokens": {"a": 1}}
    return counts | {"prompt_tokens_details": details}


# A large answer is not decoded.
@pytest.mark.parametrize(("stream", "repeats"), [(True, 1), (False, 1), (False, 12_000)])
@pytest.mark.parametrize(("late", "cached"), [("d", 4), ("p", None)])
async def test_cached_tokens_are_those_of_the_prefill_engine(
    ahead, stream: bool, repeats: int, late: str, cached: int | None
) -> None:
    text = 'I said "usage":{"prompt_tokens_details":{"cached_tokens":1}}' * repeats
    began = asyncio.Event()

    async def prefill(engine, request, writer) -> None:
        await began.wait()
        engine.send_json(writer, engine.prefill_answer(request) | {"usage": count_cached(4)})

    async def decode(engine, request, writer) -> None:
        if late == "d":
            began.set()
            await ahead.until(lambda: ahead.context.metrics.handoffs, "the prefill is done")
        choice, usage = {"index": 0, "text": text, "finish_reason": "stop"}, count_cached(7)
        if not stream:
            answer = {"choices": [choice], "usage": usage, "kv_transfer_params": None}
            engine.send_json(writer, answer)
            return
        engine.send_stream_head(writer)
        for event in ({"choices": [choice]}, {"choices": [], "usage": usage}):
            data = json.dumps(event, separators=(",", ":")).encode()
            engine.send_chunk(writer, b"data: %b\n\n" % data)
        engine.send_chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    ahead.engines["p"].script, ahead.engines["d"].script = prefill, decode
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await ahead.ask(ASK | options)
    bodies = response.events[:-1] if stream else [response.body]
    bodies = [body.removeprefix(b"data: ") for body in bodies]
    (usage,) = [value["usage"] for body in bodies if (value := json.loads(body)).get("usage")]
    details = usage["prompt_tokens_details"]
    assert (details and details["cached_tokens"]) == cached
    assert json.loads(bodies[0])["choices"][0]["text"] == text
    assert b"kv_transfer_params" not in response.body
    await ahead.until_idle()


@pytest.mark.parametrize(
    "message", [{"from_tokens": 1000}, {"free": 0}, {"waiting": 1}], ids=["short", "full", "queue"]
)
async def test_the_prompt_waits_in_the_prefill_engine_where_the_other_could_not_begin(
    pair, message
) -> None:
    offer(pair, **message)
    assert (await pair.ask(ASK)).status == 200
    assert pair.engines["d"].requests[0].body["kv_transfer_params"] == pair.engines["p"].handoff()
    assert pair.context.metrics.handoffs == {"used": 1}


async def fail(engine, request, writer):
    engine.send_json(writer, {"error": {}}, status=500)


async def vanish(engine, request, writer):
    writer.transport.abort()


async def hand_over_anothers(engine, request, writer):
    answer = engine.prefill_answer(request)
    answer["kv_transfer_params"]["remote_engine_id"] = "boot-before"
    engine.send_json(writer, answer)


@pytest.mark.parametrize(
    ("script", "cause"), [(fail, "status"), (vanish, "lost"), (hand_over_anothers, "handoff")]
)
async def test_a_lost_prefill_ends_the_decode_and_another_one_is_tried(
    make_stage, script, cause
) -> None:
    stage = await make_stage({"p": "prefill", "d": "decode", "e": "decode"})
    offer(stage)
    stage.engines["p"].script = script
    gates = [gate(stage.engines[name]) for name in "de"]
    asking = asyncio.create_task(stage.ask(ASK))
    decodes = [stage.engines["d"], stage.engines["e"]]

    def cut() -> list:
        return [request for engine in decodes for request in engine.requests if request.cut]

    await stage.until(cut, "the decode engine that waited is let go")
    assert stage.context.metrics.retries == {("prefill", cause): 1}
    for opened in gates:
        opened.set()
    assert (await asking).status == 200
    whole = [r for engine in decodes for r in engine.requests if "kv_transfer_params" not in r.body]
    assert len(whole) == 1, "the fallback computes the prompt itself"
    await stage.until_idle()


async def test_a_lost_decode_ends_the_prefill(ahead) -> None:
    gate(ahead.engines["p"])
    ahead.engines["d"].script = fail
    asking = asyncio.create_task(ahead.ask(ASK))
    await ahead.until(
        lambda: ahead.engines["p"].requests and ahead.engines["p"].requests[0].cut,
        "the prefill engine is let go",
    )
    assert ahead.context.metrics.retries["decode", "status"]
    assert (await asking).status == 502
    await ahead.until_idle()


async def test_a_client_that_leaves_lets_both_engines_go(ahead) -> None:
    for engine in ahead.engines.values():
        gate(engine)
    client = await ahead.connect()
    client.send(ASK)
    engines = ahead.engines.values()
    await ahead.until(lambda: all(e.requests for e in engines), "both are asked")
    client.close()
    await ahead.until(lambda: all(e.requests[0].cut for e in engines), "both are let go")
    await ahead.until_idle()


async def test_the_prefill_engines_refusal_goes_to_the_client(ahead) -> None:
    refusal = {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}

    async def refuse(engine, request, writer):
        engine.send_json(writer, refusal, status=400)

    gate(ahead.engines["d"])
    ahead.engines["p"].script = refuse
    response = await ahead.ask(ASK)
    assert (response.status, response.error["message"]) == (400, "too long")
    await ahead.until_idle()


@pytest.mark.parametrize(("limit", "num_overlapped"), [(0, 0), (1, 1), (1000, 0)])
async def test_workers_that_leave_the_choice_follow_the_gateways_limit(
    make_stage, limit: int, num_overlapped: int
) -> None:
    stage = await make_stage({"p": "prefill", "d": "decode"}, ahead_from_tokens=limit)
    offer(stage, from_tokens=0)
    assert (await stage.ask(ASK)).status == 200
    await stage.until_idle()
    assert stage.context.metrics.handoffs["ahead"] == num_overlapped
