"""A fault ends its own client, at once, and no other; it is one line, once a minute for each place,
without what a client has sent."""

import asyncio
import logging
from typing import Any

import httptools
import pytest

from cleave.gateway.admission import controller
from cleave.gateway.app.client_connection import ClientConnection
from cleave.gateway.app.handlers import GatewayRequestHandler
from cleave.gateway.app.pages import Pages
from cleave.gateway.context import GatewayContext
from cleave.gateway.event_loop_faults import MAX_PLACES, EventLoopFaults
from cleave.gateway.http.request_parser import RequestParser
from cleave.gateway.proxy.attempt import Attempt
from cleave.gateway.proxy.proxied_request import ProxiedRequest
from cleave.gateway.proxy.sse_relay import SseRelay
from cleave.gateway.server import TICK_S
from cleave.gateway.upstream.connection_pool import EngineConnection, EnginePool
from cleave.router.router import Router

from tests.gateway.conftest import RawClient, Stage

SECRET = "sk-secret-of-a-client"
WHOLE = {"model": "m", "prompt": "victim", "max_tokens": 3}
STREAM = WHOLE | {"stream": True}
BIG = WHOLE | {"prompt": "big"}
"""Its answer does not fit into the buffers of the kernel."""
LARGE = WHOLE | {"prompt": "victim " * 60_000}
TRANSLATED = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "x" * 8192}]}

PLACES: dict[str, tuple[type, str, dict[str, Any] | None, str]] = {
    "the parser": (RequestParser, "feed", WHOLE, "/v1/completions"),
    "a callback of the parser": (RequestParser, "on_message_complete", WHOLE, "/v1/completions"),
    "the begin of a connection": (ClientConnection, "_become_idle", WHOLE, "/v1/completions"),
    "the handler": (GatewayRequestHandler, "handle", WHOLE, "/v1/completions"),
    "its checks": (GatewayRequestHandler, "_check_path", None, "/v1/models"),
    "a page": (Pages, "build_small", None, "/openapi.json"),
    "a shared page": (Pages, "_describe_model", None, "/v1/models"),
    "a large request": (GatewayContext, "make_request_id", LARGE, "/v1/completions"),
    "the router": (Router, "pick", WHOLE, "/v1/completions"),
    "the start": (ProxiedRequest, "start", WHOLE, "/v1/completions"),
    "a start after translation": (ProxiedRequest, "start", TRANSLATED, "/v1/messages"),
    "an attempt": (Attempt, "start", STREAM, "/v1/completions"),
    "a new connection": (EnginePool, "_open_connection", STREAM, "/v1/completions"),
    "sending": (EngineConnection, "send", STREAM, "/v1/completions"),
    "the head of an answer": (EngineConnection, "on_headers_complete", STREAM, "/v1/completions"),
    "the end of an answer": (EngineConnection, "_finish_call", WHOLE, "/v1/completions"),
    "data of an answer": (Attempt, "on_data", WHOLE, "/v1/completions"),
    "a whole answer": (ProxiedRequest, "on_response", WHOLE, "/v1/completions"),
    "the begin of a stream": (ProxiedRequest, "on_stream_started", STREAM, "/v1/completions"),
    "a stream": (SseRelay, "forward", STREAM, "/v1/completions"),
    "the end of a stream": (ProxiedRequest, "_finish_stream", STREAM, "/v1/completions"),
    "the end of a request": (ProxiedRequest, "_release", STREAM, "/v1/completions"),
    "writing": (ClientConnection, "write", STREAM, "/v1/completions"),
    "the end of a response": (ClientConnection, "end", WHOLE, "/v1/completions"),
    "a full buffer": (ClientConnection, "pause_writing", BIG, "/v1/completions"),
    "a buffer with room": (ClientConnection, "resume_writing", BIG, "/v1/completions"),
    "the rest of an answer": (ClientConnection, "_send_unsent", BIG, "/v1/completions"),
    "the sweeper, of requests": (ProxiedRequest, "check_deadline", STREAM, "/v1/completions"),
    "the sweeper, of clients": (ClientConnection, "check_deadline", WHOLE, "/v1/completions"),
}


def fail() -> Exception:
    try:
        int(SECRET)
    except ValueError as error:
        return error
    raise AssertionError


async def test_a_fault_is_one_line_a_minute_for_each_place(clock, caplog) -> None:
    faults, loop = EventLoopFaults(clock), asyncio.get_running_loop()
    for _ in range(1_000):
        faults.handle(loop, {"exception": fail()})
    clock.now_s += 61
    faults.handle(loop, {"exception": fail()})
    faults.handle(loop, {"message": "a socket is left"})
    lines = [record.getMessage() for record in caplog.records]
    place = "ValueError < test_event_loop_faults.py:"
    assert [place in line for line in lines] == [True, True, False]
    assert "(999 more since it was logged last)" in lines[1]
    assert "a socket is left" in lines[2]
    assert SECRET not in caplog.text
    assert "Traceback" not in caplog.text


async def test_few_places_are_remembered(clock) -> None:
    faults = EventLoopFaults(clock)
    for number in range(10 * MAX_PLACES):
        faults.handle(asyncio.get_running_loop(), {"message": str(number)})
    assert len(faults._logged) <= MAX_PLACES


@pytest.mark.interpreted
async def test_a_fault_in_the_parser_is_reported_and_the_client_answered(
    single, monkeypatch, caplog
) -> None:
    def fail_at_head(self) -> None:
        raise ValueError(SECRET)

    monkeypatch.setattr(RequestParser, "on_headers_complete", fail_at_head)
    for _ in range(3):
        assert (await single.ask(None, "/health")).status == 500
    (record,) = caplog.records
    assert "HttpParserCallbackError" in record.getMessage()
    assert "ValueError < test_event_loop_faults.py" in record.getMessage()
    assert SECRET not in caplog.text


async def test_a_fault_of_a_connection_is_one_line(single, monkeypatch, caplog) -> None:
    monkeypatch.setattr(httptools, "HttpParserError", ())
    client = await single.connect()
    client.writer.write(b"\0")
    assert await client.is_closed()
    (record,) = caplog.records
    assert "client_connection.py" in record.getMessage()


def inject(monkeypatch, owner: type, name: str, spared: set[object]) -> list[object]:
    """The first call of a method fails, of an object that is not spared; returns who failed."""
    original, failed = getattr(owner, name), list[object]()

    def fail_once(self, *arguments: object, **options: object) -> object:
        if not failed and self not in spared:
            failed.append(self)
            raise ValueError(SECRET)
        return original(self, *arguments, **options)

    monkeypatch.setattr(owner, name, fail_once)
    return failed


async def begin_other(stage: Stage, pause_s: float) -> tuple[RawClient, asyncio.Event]:
    """A stream of another client that goes on when the event is set. Others wait so long."""
    go_on = asyncio.Event()

    async def answer(engine, request, writer) -> None:
        if request.body.get("prompt") == "other":
            engine.send_stream_head(writer)
            engine.send_chunk(writer, engine.event("one"))
            await go_on.wait()
            engine.send_chunk(writer, engine.event("two") + b"data: [DONE]\n\n")
            writer.write(b"0\r\n\r\n")
        else:
            await asyncio.sleep(pause_s)
            engine.tokens = ["x" * (16 << 20)] if request.body.get("prompt") == "big" else ["one"]
            await engine.answer(request, writer)

    stage.engines["x"].script = answer
    other = await stage.connect()
    other.send({"model": "m", "prompt": "other", "stream": True})
    await other.read_head()
    assert b"one" in await other.read_chunk()
    return other, go_on


async def ask_victim(stage: Stage, body: dict[str, Any] | None, path: str) -> bytes:
    """All that the victim gets until it is answered or closed."""
    client = await stage.connect()
    client.send(body, path, Connection="close")
    try:
        return await asyncio.wait_for(client.reader.read(), 30)
    except ConnectionError:
        return b""


@pytest.mark.interpreted
@pytest.mark.parametrize("place", PLACES)
async def test_a_fault_ends_its_own_client_at_once(single, monkeypatch, caplog, place: str) -> None:
    owner, name, body, path = PLACES[place]
    other, go_on = await begin_other(single, 2 * TICK_S if "sweeper" in place else 0.0)
    spared = {*single.context.active_requests, *single.context.clients}
    failed = inject(monkeypatch, owner, name, spared)
    got = await ask_victim(single, body, path)
    assert failed
    first, last = got.partition(b"\r\n")[0], got[-256:]
    is_cut = not got.endswith(b"0\r\n\r\n") and (not got or b" 200 " in first)
    assert is_cut or b" 500 " in first or b"internal_error" in last, got
    assert len(single.engines["x"].requests) <= 2, "it was sent to engines again"
    go_on.set()
    assert (await other.read_chunk()).endswith(b"[DONE]\n\n")
    assert (await single.ask(WHOLE)).status == 200
    assert not single.gateway.failed
    await single.until_idle()
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert any(line.startswith("fault in a callback: ") for line in lines)
    assert SECRET not in caplog.text


@pytest.mark.interpreted
async def test_a_fault_in_a_queued_request_ends_it_alone(make_stage, tmp_path, monkeypatch) -> None:
    """Others are admitted in the same turn, and after it."""
    monkeypatch.setattr(controller, "BACKLOG_LIMIT_TOKENS", 0.0)
    keys = tmp_path / "keys.yaml"
    keys.write_text("tenants: [{name: t, keys: [a-key-of-16-or-more], maxConcurrent: 9}]\n")
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    clients = [await stage.connect() for _ in range(3)]
    for client in clients:
        client.send(WHOLE, Authorization="Bearer a-key-of-16-or-more")
    await stage.until(lambda: stage.context.admission.count_waiting() == {"m": 3}, "three wait")
    failed = inject(monkeypatch, ProxiedRequest, "admit", set())
    monkeypatch.setattr(controller, "BACKLOG_LIMIT_TOKENS", 1e9)
    assert sorted([(await client.read()).status for client in clients]) == [200, 200, 500]
    assert failed
    assert not stage.gateway.failed
    await stage.until_idle()


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["_resume_parsing", "_dispatch"])
async def test_a_fault_in_a_pipelined_request_ends_the_connection(
    single, monkeypatch, name: str
) -> None:
    opened, client = single.hold(), await single.connect()
    client.writer.write(client.build(WHOLE) + client.build(None, "/health"))
    await single.until(lambda: single.engines["x"].requests, "the first has come")
    failed = inject(monkeypatch, ClientConnection, name, set())
    opened.set()
    assert (await client.read()).status == 200
    assert await client.is_closed()
    assert failed
    assert (await single.ask(WHOLE)).status == 200
