"""A request that ends engines is given to two of them, and the others go on."""

import asyncio
import json
import time

import pytest

from cleave.gateway.proxy import retry_state
from cleave.gateway.upstream import suspect_requests
from cleave.gateway.upstream.suspect_requests import (
    MAX_REMEMBERED,
    MEMORY_S,
    EngineFailure,
    SuspectRequests,
    Suspicion,
    assess_failures,
)
from cleave.rpc.v1 import agent_pb2

from tests.support.completions import parse_completion

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
STREAM = ASK | {"stream": True}
POISON = {"prompt": "poison"}
PATH = b"/v1/completions"


def parse(prompt: str):
    return parse_completion(PATH, b'{"model":"m","prompt":"%b"}' % prompt.encode())


@pytest.fixture
async def fleet(make_stage):
    """Five engines; a poisonous request ends the process of each, and its agent says so."""
    stage = await make_stage({f"x{number}": "mixed" for number in range(5)})

    async def die(engine, request, writer) -> None:
        if request.body["prompt"] != POISON["prompt"]:
            await engine.answer(request, writer)
            return
        stage.state(engine, state=agent_pb2.STATE_STARTING, reason="its process ended")
        writer.transport.abort()

    for engine in stage.engines.values():
        engine.script = die
    return stage


def count_deaths(stage) -> int:
    bodies = [request.body for engine in stage.engines.values() for request in engine.requests]
    return sum(body["prompt"] == POISON["prompt"] for body in bodies)


@pytest.mark.parametrize("body", [ASK, STREAM], ids=["whole", "stream"])
async def test_a_request_that_ends_engines_ends_two(fleet, body) -> None:
    refused = await fleet.ask(body | POISON)
    assert (refused.status, refused.error["code"]) == (502, "suspect_request")
    assert count_deaths(fleet) == 2
    again = await fleet.ask(body | POISON)
    assert (again.status, again.error["code"]) == (502, "suspect_request")
    assert count_deaths(fleet) == 2, "it is remembered"
    assert (await fleet.ask(body)).status == 200, "others are served"
    metrics = fleet.context.metrics
    assert metrics.suspects == {"m": 1}
    assert metrics.requests == {("m", "failed"): 1, ("m", "refused"): 1, ("m", "ok"): 1}
    await fleet.until_idle()


async def test_split_requests_end_no_more_engines(make_stage) -> None:
    names = {f"p{number}": "prefill" for number in range(3)}
    stage = await make_stage({**names, "d1": "decode", "d2": "decode", "d3": "decode"})

    async def die(engine, request, writer) -> None:
        stage.state(engine, state=agent_pb2.STATE_STARTING)
        writer.transport.abort()

    for engine in stage.engines.values():
        engine.script = die
    assert (await stage.ask(ASK | POISON)).error["code"] == "suspect_request"
    assert count_deaths(stage) == 2


async def test_an_engine_that_reports_an_error_before_it_exits_counts_too(fleet) -> None:
    """As vLLM does when its core process has ended."""

    async def fail(engine, request, writer) -> None:
        engine.send_json(writer, {"error": "EngineDeadError"}, status=500)
        await writer.drain()
        fleet.state(engine, state=agent_pb2.STATE_STARTING)

    for engine in fleet.engines.values():
        engine.script = fail
    assert (await fleet.ask(ASK | POISON)).error["code"] in ("suspect_request", "engine_error")
    assert count_deaths(fleet) <= 3


async def test_a_report_that_comes_later_is_waited_for(fleet) -> None:
    reports = []

    async def die(engine, request, writer) -> None:
        writer.transport.abort()

        async def report() -> None:
            await asyncio.sleep(0.4)
            fleet.state(engine, state=agent_pb2.STATE_STARTING)

        reports.append(asyncio.create_task(report()))

    for engine in fleet.engines.values():
        engine.script = die
    assert (await fleet.ask(ASK | POISON)).error["code"] == "suspect_request"
    assert count_deaths(fleet) == 2
    await asyncio.gather(*reports)


@pytest.mark.interpreted
async def test_broken_connections_to_engines_that_live_make_no_suspect(fleet, monkeypatch) -> None:
    monkeypatch.setattr(suspect_requests, "REPORT_S", 0.3)
    broken = []

    async def break_off(engine, request, writer) -> None:
        if len(broken) < 2:
            broken.append(engine)
            writer.transport.abort()
        else:
            await engine.answer(request, writer)

    for engine in fleet.engines.values():
        engine.script = break_off
    assert (await fleet.ask(ASK)).status == 200
    assert len(broken) == 2
    assert not fleet.context.metrics.suspects


@pytest.mark.interpreted
async def test_a_stream_that_has_run_for_long_is_no_suspect(fleet, monkeypatch) -> None:
    monkeypatch.setattr(retry_state, "RECENT_S", 0.1)
    started = []

    async def die_late(engine, request, writer) -> None:
        started.append(engine)
        engine.send_stream_head(writer)
        choice = {"index": 0, "text": "a", "token_ids": [len(started)], "prompt_token_ids": [7]}
        event = json.dumps({"choices": [choice]}, separators=(",", ":")).encode()
        engine.send_chunk(writer, b"data: " + event + b"\n\n")
        await writer.drain()
        if len(started) == 3:
            engine.send_chunk(writer, b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
            return
        await asyncio.sleep(0.3)
        fleet.state(engine, state=agent_pb2.STATE_STARTING)
        writer.transport.abort()

    for engine in fleet.engines.values():
        engine.script = die_late
    response = await fleet.ask(STREAM | {"max_tokens": 9})
    assert response.events[-1] == b"data: [DONE]"
    assert len(started) == 3
    assert not fleet.context.metrics.suspects


def test_suspects_are_forgotten_after_some_minutes() -> None:
    suspects = SuspectRequests()
    suspects.add(PATH, parse("a"), 0.0)
    assert suspects.contains(PATH, parse("a"))
    assert not suspects.contains(PATH, parse("b")), "of the same shape"
    assert not suspects.contains(b"/v1/chat/completions", parse("a"))
    suspects.expire(MEMORY_S - 1)
    assert suspects.contains(PATH, parse("a"))
    suspects.expire(MEMORY_S)
    assert not suspects.contains(PATH, parse("a"))
    assert not suspects.shapes


def test_a_large_suspect_is_known_again_without_reading_all_of_it() -> None:
    suspects, text = SuspectRequests(), "word " * 3_000_000
    request = parse(text)
    suspects.add(PATH, request, 0.0)
    for other in ("W" + text[1:], text[:-2] + "D "):
        assert not suspects.contains(PATH, parse(other))
    times = []
    for _ in range(5):
        began = time.thread_time()
        assert suspects.contains(PATH, request)
        times.append(time.thread_time() - began)
    assert min(times) < 0.005


def test_a_limited_number_of_suspects_is_remembered() -> None:
    suspects = SuspectRequests()
    for number in range(MAX_REMEMBERED + 10):
        suspects.add(PATH, parse(f"prompt {number:06}"), float(number))
    assert not suspects.contains(PATH, parse(f"prompt {9:06}"))
    assert suspects.contains(PATH, parse(f"prompt {10:06}"))
    assert len(suspects._entries) == MAX_REMEMBERED


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("a.rank-0", "a.rank-1"), Suspicion.NONE),  # one death ended both
        (("a.rank-0", "a.rank-0"), Suspicion.SUSPECT),
        (("a.rank-0", "a.rank-1", "b"), Suspicion.SUSPECT),
    ],
)
async def test_ranks_of_one_instance_count_as_one_engine(make_stage, names, expected) -> None:
    stage = await make_stage({"a.rank-0": "mixed", "a.rank-1": "mixed", "b": "mixed"})
    for name in ("a.rank-0", "a.rank-1"):
        stage.state(stage.engines[name], data_parallel_size=2)
    failures = [EngineFailure(name, "an earlier boot", is_broken=True) for name in names]
    assert assess_failures(failures, stage.context.router.registry, 0.0) is expected
