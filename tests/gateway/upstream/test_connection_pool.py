"""Connections to engines: kept, closed, opened anew."""

import asyncio
import socket
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest

from cleave.gateway.http.write_batcher import WriteBatcher
from cleave.gateway.upstream import connection_pool
from cleave.gateway.upstream.connection_pool import (
    FEED_BYTES,
    SENT_BYTES,
    EngineConnection,
    EnginePool,
    UpstreamCall,
)
from cleave.router.instance import Target
from cleave.time_slices import TurnQueue

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
STREAM = ASK | {"stream": True}


async def test_a_connection_that_went_stale_is_replaced_without_a_retry(single) -> None:
    client = await single.connect()
    await client.ask(ASK)
    engine = single.engines["x"]

    async def close_unanswered(engine, request, writer):
        engine.script = None
        writer.transport.abort()

    engine.script = close_unanswered
    assert (await client.ask(ASK)).status == 200
    assert engine.connections == 2
    assert not single.context.metrics.retries


async def test_a_machine_that_is_gone_is_noticed_while_an_answer_may_still_take_minutes(
    single,
) -> None:
    await single.ask(ASK)
    (pool,) = single.context._pools.values()
    (connection,) = pool._open
    opened = connection.transport.get_extra_info("socket")
    assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    probes = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
    assert [opened.getsockopt(socket.IPPROTO_TCP, one) for one in probes] == [2, 2, 10_000]


async def test_a_fresh_connection_that_breaks_is_a_failure(single) -> None:
    async def close_unanswered(engine, request, writer):
        writer.transport.abort()

    single.engines["x"].script = close_unanswered
    response = await single.ask(ASK)
    assert response.status in (502, 503)
    assert single.context.metrics.retries[("decode", "lost")] == 1


def fail_to_set(transport: asyncio.Transport) -> None:
    raise ValueError


@pytest.mark.interpreted
@pytest.mark.parametrize("work", [asyncio.Transport.abort, fail_to_set])
async def test_a_connection_that_is_gone_before_its_call_is_a_failure(
    single, monkeypatch, work
) -> None:
    monkeypatch.setattr(connection_pool, "detect_dead_peer", lambda transport: work(transport))
    response = await single.ask(ASK)
    assert response.status == 502
    assert response.error["message"] == "instance x closed the connection"


async def test_connections_that_engines_close_while_idle_are_not_used(single) -> None:
    async def answer_and_close(engine, request, writer):
        await engine.answer(request, writer)
        writer.close()

    single.engines["x"].script = answer_and_close
    client = await single.connect()
    for _ in range(5):
        assert (await client.ask(ASK)).status == 200


async def test_an_engine_gets_no_more_connections_than_allowed(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, engine_connections=2)
    opened = stage.hold()
    waiting = [asyncio.create_task(stage.ask(ASK)) for _ in range(2)]
    await stage.until(lambda: len(stage.engines["x"].requests) == 2, "both are used")
    assert (await stage.ask(ASK)).status in (502, 503)
    opened.set()
    assert [r.status for r in await asyncio.gather(*waiting)] == [200, 200]


async def test_idle_connections_are_closed_before_the_engine_does(single) -> None:
    client = await single.connect()
    await client.ask(ASK)
    pool = single.context.get_pool(single.context.router.registry.instances["x"].target)
    pool.close_idle(single.context.clock() + 1)
    assert not pool.is_empty
    pool.close_idle(single.context.clock() + 100)
    await single.until(lambda: pool.is_empty, "closed")
    assert (await client.ask(ASK)).status == 200


@pytest.mark.parametrize("size", [SENT_BYTES - 400, SENT_BYTES + 1, 20 * SENT_BYTES])
async def test_a_large_call_arrives_as_it_is_in_pieces(single, size: int) -> None:
    body = ASK | {"prompt": "".join(map(str, range(size)))[:size]}
    client = await single.connect()
    for _ in range(3):
        assert (await client.ask(body)).status == 200
    assert [each.body for each in single.engines["x"].requests] == [body] * 3
    assert single.engines["x"].connections == 1


async def test_a_connection_whose_engine_answers_before_the_end_is_not_used_again() -> None:
    turns = TurnQueue(0.5, time.monotonic)
    target = Target("x", "127.0.0.1", 9001, "", "boot", 1)
    pool = EnginePool(target, 1, 2.0, time.monotonic, WriteBatcher(), turns)
    connection, transport = EngineConnection(pool), Mock()
    connection.transport, transport.is_closing.return_value = transport, False
    for body in (b"a" * 20, b"a" * (2 * SENT_BYTES)):
        connection.send(UpstreamCall(pool, Mock(), [b"head", body]))
        connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        assert transport.close.called == (len(body) > SENT_BYTES)


async def test_engines_that_report_the_same_boot_share_no_connections(pair) -> None:
    targets = [each.target for each in pair.context.router.registry.instances.values()]
    pools = [pair.context.get_pool(replace(target, boot_id="the same")) for target in targets]
    assert len({id(pool) for pool in pools}) == len(targets) == 2


async def test_pools_of_engines_that_are_gone_are_forgotten(single) -> None:
    await single.ask(ASK)
    target = single.context.router.registry.instances["x"].target
    pool = single.context.get_pool(target)
    await single.engines["x"].stop()
    await single.until(lambda: pool.is_empty, "closed")
    single.context.expire_pools(single.context.clock())
    assert single.context.get_pool(target) is not pool
    await single.engines["x"].start()


async def test_an_interim_response_is_passed_over(single) -> None:
    async def early_hints(engine, request, writer):
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)
        await engine.answer(request, writer)

    single.engines["x"].script = early_hints
    response = await single.ask(ASK)
    assert response.status == 200
    assert "link" not in response.headers


async def test_an_engines_answer_may_arrive_byte_by_byte(pair) -> None:
    async def dribble(engine, request, writer):
        class Slow:
            written = b""

            def write(self, data):
                self.written += data

            async def drain(self):
                pass

        slow = Slow()
        await engine.answer(request, slow)
        for i in range(len(slow.written)):
            writer.write(slow.written[i : i + 1])
            await writer.drain()
            await asyncio.sleep(0)

    for engine in pair.engines.values():
        engine.script = dribble
    whole = await pair.ask(ASK)
    assert whole.json()["choices"]
    streamed = await pair.ask(STREAM)
    assert len(streamed.events) == 4
    assert pair.context.metrics.models["m"].output_tokens == 6


async def test_an_engine_that_talks_unasked_loses_its_connection(single) -> None:
    async def talk_on(engine, request, writer):
        await engine.answer(request, writer)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad")

    single.engines["x"].script = talk_on
    client = await single.connect()
    for _ in range(3):
        assert "choices" in (await client.ask(ASK)).json()
        await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("host", "expected"), [("10.0.0.7", b"10.0.0.7:9001"), ("fd00::7", b"[fd00::7]:9001")]
)
def test_the_host_header_brackets_an_ipv6_address(host: str, expected: bytes) -> None:
    target = Target("x", host, 9001, "", "boot", 1)
    pool = EnginePool(
        target, 1, 2.0, time.monotonic, WriteBatcher(), TurnQueue(0.5, time.monotonic)
    )
    assert pool.host == expected


async def test_an_error_names_no_address_of_an_engine(single) -> None:
    engine = single.engines["x"]
    await engine.stop()
    response = await single.ask(ASK)
    assert response.status in (502, 503)
    message = response.error["message"]
    assert "127.0.0.1" not in message
    assert str(engine.port) not in message
    await engine.start()


class PausingListener:
    """Pauses its call after every piece, for a turn of the event loop."""

    def __init__(self) -> None:
        self.pieces, self.is_complete, self.failed = [], False, ""
        self._is_paused = False

    def on_data(self, call, piece, complete) -> None:
        assert not self._is_paused, "it gets nothing meanwhile"
        self.pieces.append(piece)
        self.is_complete = complete
        self._is_paused = True
        call.pause()
        asyncio.get_running_loop().call_soon(self._go_on, call)

    def _go_on(self, call) -> None:
        self._is_paused = False
        call.resume()

    def on_call_failed(self, call, reason) -> None:
        self.failed = reason


async def test_a_large_read_waits_for_a_client_that_reads_in_pauses(single) -> None:
    async def stream_at_once(engine, request, writer) -> None:
        engine.send_stream_head(writer)
        events = b"".join(map(engine.event, ["abcdefgh"] * 5_000))
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(events), events))

    engine, listener = single.engines["x"], PausingListener()
    engine.script = stream_at_once
    pool = single.context.get_pool(single.context.router.registry.instances["x"].target)
    head = b"POST /v1/completions HTTP/1.1\r\n%bcontent-length: 2\r\n\r\n{}" % pool.key_header
    pool.send(listener, [head])
    await single.until(lambda: listener.is_complete or bool(listener.failed), "it ends")
    assert not listener.failed
    assert b"".join(listener.pieces).count(b"abcdefgh") == 5_000
    assert max(map(len, listener.pieces)) <= FEED_BYTES


async def test_bytes_after_a_large_answer_reach_no_other_request(single) -> None:
    async def answer_twice(engine, request, writer) -> None:
        engine.script = None
        body = b'{"choices":[{"text":"%b"}]}' % (b"x" * (FEED_BYTES * 3))
        head = b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        second = b'{"choices":[{"text":"smuggled"}]}' + b" " * 9_000
        writer.write(head % len(body) + body + head % len(second) + second)

    single.engines["x"].script = answer_twice
    answers = [await single.ask(ASK) for _ in range(3)]
    assert answers[-1].status == 200
    assert not any(b"smuggled" in answer.body for answer in answers)
    assert single.engines["x"].connections > 1
