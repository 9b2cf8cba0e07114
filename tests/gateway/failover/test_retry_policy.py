"""Engines fail; the client gets an answer, or one clear error, and nothing stays behind."""

import asyncio
import json
import time

import pytest

from cleave.api.enums import FallbackPolicy
from cleave.gateway.proxy import attempt
from cleave.rpc.v1 import agent_pb2

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
STREAM = ASK | {"stream": True}
STREAMED = STREAM | {"return_token_ids": True}
"""A request as an engine gets it."""


async def fail(engine, request, writer) -> None:
    engine.send_json(writer, {"error": "boom"}, status=500)


async def hang_up(engine, request, writer) -> None:
    writer.transport.abort()


async def hang(engine, request, writer) -> None:
    await asyncio.sleep(600)


async def garble(engine, request, writer) -> None:
    writer.write(b"this is not HTTP\r\n\r\n")


ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'


def build_error(code: int) -> bytes:
    error = {"message": "Internal server error", "type": "x", "param": None, "code": code}
    return b"data: " + json.dumps({"error": error}).encode() + b"\n\n"


def stream_events(*events: bytes):
    """Answers 200 with just these; vLLM does so with an error when no KV can be pulled."""

    async def answer(engine, request, writer):
        engine.send_stream_head(writer)
        for event in (*events, b"data: [DONE]\n\n"):
            engine.send_chunk(writer, event)
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")

    return answer


LATE_FAILURES = {
    "completion": [build_error(500)],
    "chat": [ROLE, build_error(500)],
    "in pieces": [build_error(500)[:9], build_error(500)[9:]],
    "at once": [ROLE + build_error(500)],
}
FAILURES = [fail, hang_up, hang, garble]
# A decode side that only refuses is retried once, a lost one is not.


@pytest.fixture
def two_of_each(make_stage):
    """Engines p1, p2, d1, d2; equal queues pick them in this order."""

    def make(**options: object):
        roles = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}
        return make_stage(roles, first_byte_s=0.5, response_s=0.5, **options)

    return make


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("fallback", FallbackPolicy)
async def test_a_lost_prefill_is_done_again_elsewhere(two_of_each, failure, fallback) -> None:
    stage = await two_of_each(fallback=fallback)
    stage.engines["p1"].script = failure
    response = await stage.ask(ASK)
    assert response.status == 200
    assert response.headers["x-cleave-prefill"] == "p2"
    await stage.until_idle()


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
async def test_a_decode_lost_before_the_first_byte_is_done_again(
    two_of_each, failure, body
) -> None:
    stage = await two_of_each()
    stage.engines["d1"].script = failure
    response = await stage.ask(body)
    assert response.status == 200
    assert response.headers["x-cleave-decode"] == "d2"
    assert stage.context.metrics.requests == {("m", "ok"): 1}
    await stage.until_idle()


async def test_as_many_decode_engines_are_tried_as_cannot_be_reached(make_stage) -> None:
    names = {f"d{i}": "decode" for i in range(6)}
    stage = await make_stage({"p": "prefill", **names})
    for name in list(names)[:5]:
        await stage.engines[name].stop()
    response = await stage.ask(STREAM)
    assert (response.status, response.headers["x-cleave-decode"]) == (200, "d5")
    assert stage.context.metrics.retries == {("decode", "unreached"): 5}
    await stage.until_idle()


async def test_an_engine_that_cannot_be_reached_is_one_that_is_lost(two_of_each) -> None:
    stage = await two_of_each()
    await stage.engines["p1"].stop()
    await stage.engines["d1"].stop()
    assert [(await stage.ask(ASK)).status for _ in range(3)] == [200, 200, 200]
    for name in ("p1", "d1"):
        await stage.engines[name].start()


async def test_a_whole_answer_cut_in_the_middle_is_done_again(two_of_each) -> None:
    stage = await two_of_each()

    async def cut(engine, request, writer):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        writer.transport.abort()

    stage.engines["d1"].script = cut
    response = await stage.ask(ASK)
    assert (response.status, response.headers["x-cleave-decode"]) == (200, "d2")


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize(
    ("fallback", "status"),
    [
        (FallbackPolicy.ALWAYS, 200),
        (FallbackPolicy.ON_PREFILL_LOSS, 200),
        (FallbackPolicy.NEVER, None),
    ],
)
async def test_without_another_prefill_the_fallback_decides(
    make_stage, failure, fallback, status
) -> None:
    stage = await make_stage(
        {"p": "prefill", "d": "decode"}, fallback=fallback, first_byte_s=0.5, response_s=0.5
    )
    stage.engines["p"].script = failure
    response = await stage.ask(ASK)
    if status == 200:
        assert response.status == status
        assert stage.engines["d"].requests[0].body == ASK
    else:
        assert response.status in (502, 504)
        assert "instance p " in response.error["message"]
    await stage.until_idle()


@pytest.mark.parametrize(
    ("fallback", "status"),
    [
        (FallbackPolicy.ALWAYS, 200),
        (FallbackPolicy.ON_PREFILL_LOSS, 503),
        (FallbackPolicy.NEVER, 503),
    ],
)
async def test_only_always_starts_without_a_prefill_instance(make_stage, fallback, status) -> None:
    stage = await make_stage({"d": "decode"}, fallback=fallback)
    assert (await stage.ask(ASK)).status == status


@pytest.mark.parametrize(
    "handoff",
    [
        {"do_remote_prefill": True, "remote_engine_id": "boot-of-another"},
        {"do_remote_prefill": True},
        "nonsense",
    ],
    ids=["other boot", "no boot", "not an object"],
)
async def test_a_hand_off_of_the_wrong_boot_is_thrown_away(pair, handoff) -> None:
    async def mislead(engine, request, writer):
        engine.send_json(writer, engine.prefill_answer() | {"kv_transfer_params": handoff})

    pair.engines["p"].script = mislead
    assert (await pair.ask(ASK)).status == 200
    assert pair.engines["d"].requests[0].body == ASK
    assert pair.context.metrics.handoffs == {"refused": 1}
    assert pair.context.metrics.retries == {("prefill", "handoff"): 1}


async def test_a_hand_off_of_another_request_is_thrown_away(pair) -> None:
    answers = []

    async def answer_with_an_earlier_one(engine, request, writer):
        answers.append(engine.prefill_answer(request))
        engine.send_json(writer, answers[0])

    pair.engines["p"].script = answer_with_an_earlier_one
    assert [(await pair.ask(ASK)).status for _ in range(2)] == [200, 200]
    assert pair.engines["d"].requests[-1].body == ASK
    assert pair.context.metrics.handoffs == {"used": 1, "refused": 1}


@pytest.mark.interpreted
@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
async def test_kv_of_which_the_lease_may_have_ended_is_not_used(pair, body, monkeypatch) -> None:
    """Its decode engine stood still in between: vLLM would go on from what lies there now."""
    monkeypatch.setattr(attempt, "KV_LEASE_S", 0.0)
    registry = pair.context.router.registry

    async def stand_still(engine, request, writer):
        if "kv_transfer_params" in request.body:
            registry.instances["d"].stalled_at = pair.context.clock() + 1
        await type(engine).answer(engine, request, writer)

    pair.engines["d"].script = stand_still
    assert (await pair.ask(body)).status == 200
    has_handoff = ["kv_transfer_params" in request.body for request in pair.engines["d"].requests]
    assert has_handoff == [True, False]
    assert pair.context.metrics.handoffs == {"used": 1, "failed": 1}
    await pair.until_idle()


async def test_an_answer_that_waited_long_in_a_queue_is_used(pair, monkeypatch) -> None:
    monkeypatch.setattr(attempt, "KV_LEASE_S", 0.0)
    assert (await pair.ask(STREAM)).status == 200
    assert pair.context.metrics.handoffs == {"used": 1}


async def test_a_hand_off_that_cannot_be_pulled_is_computed_anew(pair) -> None:
    """vLLM answers 500 when the KV is gone; the same instance may do both phases."""

    async def refuse_handoff(engine, request, writer):
        await (fail if "kv_transfer_params" in request.body else type(engine).answer)(
            engine, request, writer
        )

    pair.engines["d"].script = refuse_handoff
    assert (await pair.ask(STREAM)).status == 200
    assert pair.engines["d"].requests[-1].body == STREAMED


@pytest.mark.parametrize("events", LATE_FAILURES.values(), ids=LATE_FAILURES)
async def test_a_stream_that_begins_with_an_error_is_done_again(two_of_each, events) -> None:
    stage = await two_of_each()
    stage.engines["d1"].script = stream_events(*events)
    response = await stage.ask(STREAM)
    assert (response.status, response.headers["x-cleave-decode"]) == (200, "d2")
    assert response.events == [
        *(stage.engines["d2"].event(token).strip() for token in ("one", "two", "three")),
        b"data: [DONE]",
    ]
    assert stage.engines["d2"].requests[-1].body == STREAMED, "the KV is not pulled a second time"
    assert stage.context.metrics.retries == {("decode", "status"): 1}
    await stage.until_idle()


@pytest.mark.parametrize("events", LATE_FAILURES.values(), ids=LATE_FAILURES)
async def test_streams_that_all_begin_with_an_error_end_in_an_error_status(single, events) -> None:
    single.engines["x"].script = stream_events(*events)
    client = await single.connect()
    response = await client.ask(STREAM)
    assert (response.status, response.error["code"]) == (502, "engine_error")
    assert len(single.engines["x"].requests) == 3
    assert single.context.metrics.requests == {("m", "failed"): 1}
    single.engines["x"].script = None
    assert (await client.ask(STREAM)).status == 200, "the connection goes on"
    await single.until_idle()


async def test_a_stream_whose_engine_is_lost_after_its_last_event_is_complete(single) -> None:
    async def answer(engine, request, writer):
        engine.send_stream_head(writer)
        for event in (engine.event("one"), b"data: [DONE]\n\n"):
            engine.send_chunk(writer, event)
        await writer.drain()
        writer.close()

    single.engines["x"].script = answer
    client = await single.connect()
    response = await client.ask(STREAM)
    assert response.events == [single.engines["x"].event("one").strip(), b"data: [DONE]"]
    assert single.context.metrics.requests == {("m", "ok"): 1}
    single.engines["x"].script = None
    assert (await client.ask(STREAM)).status == 200, "the connection goes on"
    await single.until_idle()


CHAT_PATH = "/v1/chat/completions"
STOPPED = {
    "model": "m",
    "messages": [],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0,
    "stop": ["tavu"],
}
"""A chat that is replayed: text is held back, and the last events come at once."""


def build_stopped_chat(*texts: str, finish: str = "stop") -> list[bytes]:
    """The events of such a chat: role, texts, usage, end."""
    deltas = [{"role": "assistant", "content": ""}, *({"content": text} for text in texts)]
    choices: list[dict] = [{"index": 0, "delta": each, "finish_reason": None} for each in deltas]
    choices[-1]["finish_reason"] = finish
    usage = {"choices": [], "usage": {"completion_tokens": len(texts)}}
    values = [*({"choices": [choice]} for choice in choices), usage]
    events = [b"data: " + json.dumps(v, separators=(",", ":")).encode() + b"\n\n" for v in values]
    return [*events, b"data: [DONE]\n\n"]


async def test_a_stream_cut_at_any_byte_has_one_end(make_stage) -> None:
    stage = await make_stage({"a": "mixed", "b": "mixed"})
    events = build_stopped_chat("", "al", "pha ")
    body = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"
    cuts = iter(())

    async def answer(engine, request, writer):
        cut = next(cuts, None)
        engine.send_stream_head(writer)
        writer.write(body[:cut])
        await writer.drain()
        if cut is not None:
            writer.close()

    for engine in stage.engines.values():
        engine.script = answer
    client = await stage.connect()
    for cut in {*range(0, len(body), 9), *range(len(body) - 30, len(body))}:
        cuts = iter([cut])
        response = await client.ask(STOPPED, CHAT_PATH)
        assert response.events[-1] == b"data: [DONE]", cut
        values = [json.loads(event.removeprefix(b"data: ")) for event in response.events[:-1]]
        deltas = [choice["delta"] for value in values for choice in value["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "alpha ", cut
        assert [value["usage"] for value in values if "usage" in value] == [
            {"completion_tokens": 3}
        ], cut
    await stage.until_idle()


async def test_a_replay_that_is_aborted_gives_no_usage(make_stage) -> None:
    """The client has the text and its end, so that only the usage is missing."""
    stage = await make_stage({"a": "mixed", "b": "mixed", "c": "mixed"})
    whole = build_stopped_chat("al", "pha ")
    answers = iter([whole[:3], build_stopped_chat("al", "", finish="abort"), whole])

    async def answer(engine, request, writer):
        engine.send_stream_head(writer)
        for event in next(answers):
            engine.send_chunk(writer, event)
        writer.write(b"0\r\n\r\n")

    for engine in stage.engines.values():
        engine.script = answer
    response = await stage.ask(STOPPED, CHAT_PATH)
    assert response.events == [event.strip() for event in whole]
    assert next(answers, None) is None
    await stage.until_idle()


async def test_a_refusal_in_a_stream_is_the_engines_answer(single) -> None:
    single.engines["x"].script = stream_events(build_error(400))
    response = await single.ask(STREAM)
    assert response.status == 200
    error, done = response.events
    assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "Internal server error"
    assert done == b"data: [DONE]"
    assert len(single.engines["x"].requests) == 1


async def test_a_role_that_nothing_follows_is_lost_before_the_first_byte(two_of_each) -> None:
    stage = await two_of_each()

    async def say_the_role(engine, request, writer):
        engine.send_stream_head(writer)
        engine.send_chunk(writer, ROLE)
        await writer.drain()
        await asyncio.sleep(600)

    stage.engines["d1"].script = say_the_role
    response = await stage.ask(STREAM)
    assert (response.status, response.headers["x-cleave-decode"]) == (200, "d2")
    assert ROLE.strip() not in response.events
    await stage.until(lambda: stage.engines["d1"].requests[0].cut, "its connection is closed")


async def test_a_role_and_what_follows_pass_in_order(single) -> None:
    single.engines["x"].script = stream_events(ROLE, single.engines["x"].event("one"))
    response = await single.ask(STREAM)
    assert response.events == [
        ROLE.strip(),
        single.engines["x"].event("one").strip(),
        b"data: [DONE]",
    ]


async def test_when_everything_fails_the_error_names_the_last_cause(two_of_each) -> None:
    stage = await two_of_each()
    for engine in stage.engines.values():
        engine.script = fail
    response = await stage.ask(ASK)
    assert response.status in (502, 503)
    assert response.error["type"] == "server_error"
    attempts = sum(len(engine.requests) for engine in stage.engines.values())
    assert attempts <= 8, "every retry is budgeted"
    await stage.until_idle()


async def test_a_request_that_times_out_everywhere_is_a_gateway_timeout(make_stage) -> None:
    stage = await make_stage({f"x{i}": "mixed" for i in range(5)}, response_s=0.3)
    for engine in stage.engines.values():
        engine.script = hang
    response = await stage.ask(ASK)
    assert (response.status, response.error["code"]) == (504, "engine_timeout")
    assert sum(len(engine.requests) for engine in stage.engines.values()) == 3
    await stage.until(
        lambda: all(r.cut for e in stage.engines.values() for r in e.requests), "all are stopped"
    )


async def report_steps(stage) -> None:
    """What agents of engines that work report."""
    while True:
        for name in stage.engines:
            load = agent_pb2.LoadReport(boot_id=f"boot-{name}", sampled_ns=time.time_ns())
            event = agent_pb2.WatchEvent(load=load)
            stage.context.router.registry.on_event(name, event, stage.context.clock())
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("body", [ASK, STREAM])
@pytest.mark.parametrize(
    "roles", [{"p": "prefill", "d": "decode", "p2": "prefill"}, {"x": "mixed"}]
)
async def test_what_a_working_engine_needs_more_time_for_is_computed_once(
    make_stage, roles: dict, body: dict
) -> None:
    stage = await make_stage(roles | {"y": "mixed"}, first_byte_s=0.4, response_s=0.4)
    for engine in stage.engines.values():
        engine.script = hang
    reports = asyncio.create_task(report_steps(stage))
    response = await stage.ask(body)
    reports.cancel()
    assert (response.status, response.error["code"]) == (504, "engine_timeout")
    assert "though an engine works on it" in response.error["message"]
    assert sum(len(engine.requests) for engine in stage.engines.values()) == 1
    assert not stage.context.circuit_breaker.failure_states
    await stage.until_idle()


async def test_a_role_is_the_first_byte_of_an_engine_that_works(make_stage) -> None:
    """It hides the reasoning, or parses a call that it writes in one piece."""
    stage = await make_stage({"x": "mixed", "y": "mixed"}, first_byte_s=0.4, response_s=20.0)

    async def think(engine, request, writer):
        engine.send_stream_head(writer)
        engine.send_chunk(writer, ROLE)
        await writer.drain()
        await asyncio.sleep(1.5)
        for event in (engine.event("one"), b"data: [DONE]\n\n"):
            engine.send_chunk(writer, event)
        writer.write(b"0\r\n\r\n")

    for engine in stage.engines.values():
        engine.script = think
    reports = asyncio.create_task(report_steps(stage))
    response = await stage.ask(STREAM)
    reports.cancel()
    assert response.events[-1] == b"data: [DONE]"
    assert sum(len(engine.requests) for engine in stage.engines.values()) == 1


async def test_each_attempt_has_an_id_of_its_own(two_of_each) -> None:
    stage = await two_of_each()
    stage.engines["d1"].script = fail
    await stage.ask(ASK)
    ids = {e.name: [r.headers["x-request-id"] for r in e.requests] for e in stage.engines.values()}
    assert ids["d1"] != ids["d2"]


@pytest.mark.parametrize("ending", ["abort", "garbage", "silence", "early end"])
async def test_a_stream_lost_midway_ends_with_an_error_event(make_stage, ending: str) -> None:
    stage = await make_stage({"p": "prefill", "d": "decode", "d2": "decode"}, idle_s=0.5)

    async def break_off(engine, request, writer):
        engine.send_stream_head(writer)
        engine.send_chunk(writer, engine.event("one"))
        await writer.drain()
        await asyncio.sleep(0.05)
        match ending:
            case "abort":
                writer.transport.abort()
            case "garbage":
                writer.write(b"zzz\r\n")
            case "silence":
                await asyncio.sleep(600)
            case "early end":
                writer.close()

    for name in ("d", "d2"):
        stage.engines[name].script = break_off
    client = await stage.connect()
    client.send(STREAM)
    response = await client.read()
    first, last = response.events
    assert first == stage.engines["d"].event("one").strip()
    assert json.loads(last.removeprefix(b"data: "))["error"]["message"]
    assert await client.is_closed()
    assert stage.context.metrics.requests == {("m", "broken"): 1}
    await stage.until_idle()


async def test_half_an_event_reaches_no_client(single) -> None:
    async def cut(engine, request, writer):
        engine.send_stream_head(writer)
        engine.send_chunk(writer, engine.event("one") + b'data: {"half')
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    single.engines["x"].script = cut
    response = await single.ask(STREAM)
    first, last = response.events
    assert first == single.engines["x"].event("one").strip()
    assert "error" in json.loads(last.removeprefix(b"data: "))


@pytest.mark.parametrize("moment", ["prefill", "first token", "mid-stream"])
async def test_a_client_disconnect_stops_its_engine_requests(pair, moment: str) -> None:
    async def go_on(engine, request, writer):
        if moment == "prefill" or (moment == "first token" and not request.is_prefill):
            await asyncio.sleep(600)
        elif request.is_prefill:
            await engine.answer(request, writer)
        else:
            await engine.stream(writer, ["t"] * 100_000, pause_s=0.01)

    for engine in pair.engines.values():
        engine.script = go_on
    running = pair.engines["p" if moment == "prefill" else "d"]
    client = await pair.connect()
    client.send(STREAM)
    if moment == "mid-stream":
        await client.read_head()
    await pair.until(lambda: bool(running.requests), "the engine works")
    client.close()
    await pair.until(lambda: running.requests[0].cut, "its connection is closed")
    await pair.until_idle()
    assert pair.context.metrics.requests == {("m", "cancelled"): 1}


@pytest.mark.parametrize("script", [hang_up, fail])
async def test_after_one_data_parallel_rank_the_others_are_not_tried(make_stage, script) -> None:
    """Their engines end a moment later, and their agents have not said so yet."""
    ranks = [f"a.rank-{number}" for number in range(3)]
    stage = await make_stage({**dict.fromkeys(ranks, "mixed"), "b": "mixed"})
    for name in ranks:
        stage.state(stage.engines[name], data_parallel_size=3)
        stage.engines[name].script = script
    for _ in range(4):
        assert (await stage.ask(ASK)).status == 200
    tried = [len(stage.engines[name].requests) for name in ranks]
    assert sum(tried) <= 4, f"a request was given to two of them: {tried}"
    assert sum(tried) > 0
    await stage.until_idle()
