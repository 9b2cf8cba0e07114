"""What one client can take of a gateway: memory, connections, and the others' turn."""

import asyncio
import contextlib
import gc
import json
import socket
import time

import pytest

from cleave.gateway.app import client_connection as client_module
from cleave.gateway.app.client_connection import (
    FEED_BYTES,
    RECEIVE_BUFFER_BYTES,
    SEND_BUFFER_BYTES,
    WRITE_BUFFER_BYTES,
)
from cleave.gateway.app.handlers import LARGE_BODY_BYTES
from cleave.gateway.http.request_parser import HttpRequest

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
KEYED = HEAD + b"Authorization: Bearer secret-of-attacks\r\n"
PAGE = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("secret-of-attacks\n")
    return file


async def find_connection(stage):
    """The gateway's side of the only client."""
    await stage.until(lambda: len(stage.context.clients) == 1, "it is connected")
    (connection,) = stage.context.clients
    return connection


def count_written(connection) -> int:
    return connection.transport.get_write_buffer_size()


async def test_requests_wait_until_earlier_answers_are_read(single) -> None:
    client = await single.connect()
    client.writer.transport.pause_reading()
    connection = await find_connection(single)
    client.writer.write(PAGE * 2_000)
    most = 0
    for _ in range(100):
        most = max(most, count_written(connection))
        await asyncio.sleep(0.01)
    assert connection.blocked
    sock = connection.transport.get_extra_info("socket")
    kernel_bytes = sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert kernel_bytes == 2 * SEND_BUFFER_BYTES <= single.context.buffer_budget.used
    page = await single.ask(None, "/openapi.json")
    assert 0 < most < WRITE_BUFFER_BYTES + 2 * len(page.body), "what the kernel does not hold"
    assert (await single.ask(ASK)).status == 200
    client.writer.transport.resume_reading()
    for _ in range(2_000):
        assert (await client.read()).status == 200


async def test_few_of_many_pipelined_requests_are_made_at_a_time(single) -> None:
    opened = single.hold()
    client = await single.connect()
    connection = await find_connection(single)
    shortest = b"GET /x HTTP/1.1\r\n\r\n"
    client.writer.write(client.build(ASK) + shortest * 20_000)
    await single.until(lambda: bool(single.engines["x"].requests), "the first one runs")
    await asyncio.sleep(0.2)
    assert len(connection._reader.ready) <= FEED_BYTES / len(shortest)
    kernel_bytes = 2 * RECEIVE_BUFFER_BYTES
    assert kernel_bytes < single.context.buffer_budget.used < 1 << 20, "the rest is left unread"
    sock = connection.transport.get_extra_info("socket")
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) == kernel_bytes
    opened.set()
    assert (await client.read()).status == 200
    for _ in range(20_000):
        assert (await client.read()).status == 404


@pytest.mark.parametrize("begun", [b"0\r\nX: ", b"1;a="], ids=["trailer", "extension"])
async def test_framing_without_an_end_is_refused(single, begun: bytes) -> None:
    client = await single.connect()
    client.writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + begun)

    async def go_on() -> None:
        with contextlib.suppress(ConnectionError):
            for _ in range(1_000):
                client.writer.write(b"a" * 10_000)
                await client.writer.drain()

    sending = asyncio.create_task(go_on())
    assert (await client.read()).status == 400
    sending.cancel()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (HEAD, 401),
        (KEYED.replace(b"secret", b"other"), 401),
        (KEYED.replace(b"/v1/completions", b"/nowhere"), 404),
        (KEYED.replace(b"POST", b"PUT"), 405),
    ],
)
async def test_a_request_is_refused_by_its_head_before_its_body_has_come(
    make_stage, keys, head: bytes, status: int
) -> None:
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    client = await stage.connect()
    client.writer.write(head + b"Content-Length: 1000000\r\n\r\n")
    response = await client.read()
    assert (response.status, response.headers["connection"]) == (status, "close")
    assert stage.context.buffer_budget.used == 0
    assert await client.is_closed()


async def test_with_a_key_the_body_is_read(make_stage, keys) -> None:
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    client = await stage.connect()
    raw = json.dumps(ASK).encode()
    client.writer.write(KEYED + b"Content-Length: %d\r\n\r\n" % len(raw))
    await asyncio.sleep(0.05)
    client.writer.write(raw)
    assert (await client.read()).status == 200


async def test_bodies_that_are_not_whole_share_a_limit(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, max_buffered_bytes=1 << 20, max_body_bytes=1 << 20)
    first, second = await stage.connect(), await stage.connect()
    half = HEAD + b"Content-Length: 1000000\r\n\r\n" + b"x" * 700_000
    first.writer.write(half)
    await stage.until(lambda: stage.context.buffer_budget.used >= 700_000, "the first has its part")
    second.writer.write(half)
    refused = await second.read()
    assert (refused.status, refused.error["code"]) == (503, "receiving_too_much")
    assert int(refused.headers["retry-after"]) > 0
    assert stage.context.buffer_budget.used < 1 << 20
    assert (await stage.ask(ASK)).status == 200, "what comes in one read is served"
    first.close()
    await stage.until(lambda: stage.context.buffer_budget.used == 0, "the first has gone")
    third = await stage.connect()
    third.writer.write(half)
    await stage.until(lambda: stage.context.buffer_budget.used >= 700_000, "there is room again")


async def test_what_waits_behind_an_answer_counts_as_well(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, max_buffered_bytes=20_000, max_body_bytes=20_000)
    opened = stage.hold()
    client = await stage.connect()
    client.send(ASK)
    await stage.until(lambda: bool(stage.engines["x"].requests), "it runs")
    client.writer.write(PAGE * 10_000)
    await asyncio.sleep(0.1)
    assert stage.context.buffer_budget.used <= 20_000
    opened.set()
    assert (await client.read()).status == 200, "the answer that runs is not lost"
    assert (await client.read()).status == 503
    assert await client.is_closed()


async def test_the_bodies_of_answered_requests_are_not_counted(single) -> None:
    client = await single.connect()
    for size in (10, 100_000, 3_000_000, 0):
        assert (await client.ask(ASK | {"prompt": "x" * size})).status == 200
        assert single.context.buffer_budget.used == 0


async def test_bodies_that_are_served_share_the_limit(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, max_buffered_bytes=1_000_000, max_body_bytes=1_000_000)
    opened = stage.hold()
    first = await stage.connect()
    first.send(ASK | {"prompt": "x" * 700_000})
    await stage.until(lambda: bool(stage.engines["x"].requests), "it runs")
    assert stage.context.buffer_budget.used >= 700_000
    refused = await stage.ask(ASK | {"prompt": "y" * 700_000})
    assert (refused.status, refused.error["code"]) == (503, "receiving_too_much")
    small = await stage.connect()
    small.send(ASK)
    await stage.until(lambda: len(stage.engines["x"].requests) == 2, "small ones are served")
    opened.set()
    assert [(await client.read()).status for client in (first, small)] == [200, 200]
    assert stage.context.buffer_budget.used == 0
    assert (await stage.ask(ASK | {"prompt": "y" * 700_000})).status == 200


async def test_a_client_that_leaves_gives_its_share_back(single) -> None:
    opened = single.hold()
    client = await single.connect()
    client.send(ASK | {"prompt": "x" * 700_000})
    await single.until(lambda: bool(single.engines["x"].requests), "it runs")
    client.close()
    await single.until(lambda: single.context.buffer_budget.used == 0, "nothing is left")
    opened.set()


async def test_clients_that_do_not_read_their_answers_share_the_limit(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, max_buffered_bytes=20 << 20, max_body_bytes=1 << 20)

    async def answer_much(engine, request, writer) -> None:
        text = "x" * (8 << 20) if request.body["prompt"] == "much" else ""
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        answer = {"choices": [{"text": text}], "usage": usage, "kv_transfer_params": None}
        engine.send_json(writer, answer)

    stage.engines["x"].script = answer_much
    clients = []
    for number in range(8):
        client = await stage.connect()
        client.writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10
        )
        client.writer.transport.pause_reading()
        client.send(ASK | {"prompt": "much"})
        clients.append(client)
        await stage.until(lambda n=number: len(stage.engines["x"].requests) > n, "it is served")
        await stage.until(lambda: stage.context.metrics.in_flight == 0, "it is answered")
        assert stage.context.buffer_budget.used <= 20 << 20
    assert (await stage.ask(ASK)).status == 200
    assert len(stage.context.clients) < 8, "who has not read for longest was cut off"
    last = clients[-1]
    last.writer.transport.resume_reading()
    assert (await last.read()).status == 200


async def test_answers_that_are_collected_share_the_limit_and_are_computed_once(make_stage) -> None:
    stage = await make_stage(
        {"x": "mixed", "y": "mixed"}, max_buffered_bytes=1 << 20, max_body_bytes=1 << 20
    )

    async def answer_much(engine, request, writer) -> None:
        engine.send_json(writer, {"choices": [{"text": "x" * (2 << 20)}]})

    for engine in stage.engines.values():
        engine.script = answer_much
    refused = await stage.ask(ASK)
    assert (refused.status, refused.error["code"]) == (502, "engine_error")
    assert "stream it" in refused.error["message"]
    assert sum(len(engine.requests) for engine in stage.engines.values()) == 1
    assert stage.context.metrics.retries == {("decode", "too_long"): 1}
    await stage.until_idle()
    assert stage.context.buffer_budget.used == 0


@pytest.mark.interpreted
async def test_a_body_that_comes_too_slowly_is_refused(make_stage, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "MIN_BODY_RATE", 1 << 20)
    stage = await make_stage({"x": "mixed"}, idle_s=0.5)
    client = await stage.connect()
    client.writer.write(HEAD + b"Content-Length: 1000000\r\n\r\n")

    async def drip() -> None:
        with contextlib.suppress(ConnectionError):
            while True:
                client.writer.write(b"x")
                await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    refused = await client.read()
    assert (refused.status, refused.error["code"]) == (408, "request_timeout")
    dripping.cancel()


@pytest.mark.interpreted
async def test_a_large_body_may_take_longer_than_a_pause_may(make_stage, monkeypatch) -> None:
    monkeypatch.setattr(client_module, "MIN_BODY_RATE", 1_000)
    stage = await make_stage({"x": "mixed"}, idle_s=0.5)
    client = await stage.connect()
    raw = json.dumps(ASK | {"prompt": "x" * 10_000}).encode()
    client.writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(raw))
    for start in range(0, len(raw), 1_000):
        client.writer.write(raw[start : start + 1_000])
        await asyncio.sleep(0.15)
    assert (await client.read()).status == 200


async def test_a_refused_body_is_freed_at_once(single) -> None:
    client = await single.connect()
    gc.collect()
    # Requests that tests of other modules keep.
    before = {id(each) for each in gc.get_objects() if type(each) is HttpRequest}
    gc.disable()
    try:
        for body in (ASK | {"model": "other"}, ASK | {"prompt": ["x"] * 2_000}):
            assert (await client.ask(body)).status in (400, 404)
        await asyncio.sleep(0)
        requests = [each for each in gc.get_objects() if type(each) is HttpRequest]
        assert not [each for each in requests if id(each) not in before]
    finally:
        gc.enable()


async def test_large_bodies_wait_for_each_other_and_small_ones_do_not(single) -> None:
    context, waits_s = single.context, 2.0
    large = ASK | {"prompt": "x" * (LARGE_BODY_BYTES + 1)}
    before = context.clock()
    assert (await single.ask(large)).status == 200
    assert context.large_bodies.next_at > before, "it has cost something"
    context.large_bodies.next_at = context.clock() + waits_s
    began = time.monotonic()
    waiting = asyncio.create_task(single.ask(large))
    assert (await single.ask(ASK)).status == 200
    budget = context.buffer_budget
    await single.until(lambda: budget.used > LARGE_BODY_BYTES, "it counts while it waits")
    assert not waiting.done()
    assert (await waiting).status == 200
    assert time.monotonic() - began >= waits_s
    assert context.buffer_budget.used == 0


async def test_a_large_body_is_forgotten_when_its_client_leaves(single) -> None:
    context = single.context
    context.large_bodies.next_at = context.clock() + 60
    client = await single.connect()
    client.send(ASK | {"prompt": "x" * 600_000})
    await single.until(lambda: context.buffer_budget.used > 600_000, "it waits")
    client.close()
    await single.until(lambda: context.buffer_budget.used == 0, "it is forgotten")


async def test_large_bodies_that_wait_share_a_limit(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, max_buffered_bytes=1_000_000)
    stage.context.large_bodies.next_at = stage.context.clock() + 0.6
    large = ASK | {"prompt": "x" * 600_000}
    first, second = [asyncio.create_task(stage.ask(large)) for _ in range(2)]
    statuses = sorted([(await first).status, (await second).status])
    assert statuses == [200, 503]
    assert stage.context.buffer_budget.used == 0


async def test_what_a_refused_client_still_sends_is_read_slowly(make_stage, keys) -> None:
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    client = await stage.connect()
    client.writer.write(HEAD + b"Content-Length: 16000000\r\n\r\n")
    sent = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.5):
            while sent < 200 << 20:
                client.writer.write(b"x" * (1 << 20))
                await client.writer.drain()
                sent += 1 << 20
    assert sent < 100 << 20
    assert (await client.read()).status == 401


@pytest.mark.interpreted
async def test_a_client_that_sends_much_has_one_read_a_turn(single, monkeypatch) -> None:
    """The event loop would read 32 times in a row from it, while others wait."""
    client = await single.connect()
    connection = await find_connection(single)
    reads, most = 0, 0
    feed = connection._reader.feed

    def count(data: bytes) -> None:
        nonlocal reads, most
        if not reads:
            asyncio.get_running_loop().call_soon(end_turn)
        reads += len(data)
        most = max(most, reads)
        feed(data)

    def end_turn() -> None:
        nonlocal reads
        reads = 0

    monkeypatch.setattr(connection._reader, "feed", count)
    client.send(ASK | {"prompt": "x" * 8_000_000})
    assert (await client.read()).status == 200
    assert most <= 300_000


# --- connections ---


async def test_clients_cannot_keep_others_from_the_internal_port(make_stage, internal_port) -> None:
    stage = await make_stage({"x": "mixed"}, max_clients=3, internal_port=internal_port)
    opened = stage.hold()
    for _ in range(3):
        (await stage.connect()).send(ASK)
    await stage.until(lambda: len(stage.engines["x"].requests) == 3, "all of them run")
    assert await (await stage.connect()).is_closed(), "the port is full"
    public, stage.gateway.port = stage.gateway.port, internal_port
    for path in ("/livez", "/health", "/metrics", "/fleet"):
        assert (await stage.ask(None, path)).status == 200
    stage.gateway.port = public
    opened.set()


async def test_clients_without_a_key_take_turns_in_a_share_of_the_time(
    make_stage, tmp_path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-of-a-client-with-one\n")
    stage = await make_stage({"x": "mixed"}, api_keys=keys)
    clients = [await stage.connect() for _ in range(20)]
    for client in clients:
        client.writer.write(b"GET /v1/models HTTP/1.1\r\nHost: g\r\n\r\n" * 100)
    waiting = stage.context.keyless_turns._waiting
    await stage.until(lambda: any(first for first, _ in waiting.values()), "first ones wait, too")
    await stage.until(
        lambda: any(len(others) >= 19 for _, others in waiting.values()),
        "all have had an answer and wait",
    )
    answer = await stage.ask(ASK, Authorization="Bearer key-of-a-client-with-one")
    assert answer.status == 200
    assert waiting, "it did not wait for them"
    for client in clients:
        for _ in range(100):
            assert (await client.read()).status == 401
    client = clients[0]
    for _ in range(3):
        assert (await client.ask(ASK)).status == 401
    clients[1].writer.close()
    await stage.until(lambda: not waiting, "none is left")


async def test_a_full_port_closes_who_is_idle_longest(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, max_clients=3)
    opened = stage.hold()
    busy = await stage.connect()
    busy.send(ASK)
    await stage.until(lambda: bool(stage.engines["x"].requests), "it runs")
    stage.context.address_debts.add("127.0.0.1", 9)  # as a stranger's
    silent, used = await stage.connect(), await stage.connect()
    await used.ask(None, "/health")
    assert (await stage.ask(None, "/health")).status == 200
    assert await silent.is_closed()
    assert (await used.ask(None, "/health")).status == 200
    opened.set()
    assert (await busy.read()).status == 200


async def test_a_connection_of_a_known_client_waits_for_its_request(make_stage) -> None:
    """Silent ones of other addresses are closed for it, though each of these has fewer."""
    stage = await make_stage({"x": "mixed"}, max_clients=3)
    assert (await stage.ask(ASK)).status == 200
    others = [
        await asyncio.open_connection(
            "127.0.0.1", stage.gateway.port, local_addr=(f"127.0.2.{number}", 0)
        )
        for number in range(1, 4)
    ]
    await stage.until(lambda: len(stage.context.clients) == 3, "all places are taken")
    own = [await stage.connect() for _ in range(2)]
    for reader, _ in others[:2]:
        assert await reader.read() == b""
    for number in range(4, 9):
        others.append(
            await asyncio.open_connection(
                "127.0.0.1", stage.gateway.port, local_addr=(f"127.0.2.{number}", 0)
            )
        )
    for reader, _ in others[2:7]:
        assert await reader.read() == b""
    for each in own:
        assert (await each.ask(ASK)).status == 200
    for _, writer in others:
        writer.close()


async def test_an_answer_is_sent_whole_to_a_client_that_is_closed_to_make_room(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, max_clients=1)
    client = await stage.connect()
    await stage.until(lambda: len(stage.context.clients) == 1, "it is connected")
    (connection,) = stage.context.clients
    end, ended = connection.end, []

    def end_and_drop(reusable: bool) -> None:
        end(reusable)
        connection.drop()
        ended.append(reusable)

    connection.end = end_and_drop
    response = await client.ask(ASK)
    assert ended == [True]
    assert response.status == 200
    assert response.json()["usage"]
    assert await client.is_closed()


async def test_half_a_head_does_not_keep_a_place(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, max_clients=2)
    for _ in range(2):
        (await stage.connect()).writer.write(b"GET /")
    begun = 2 * len(b"GET /")
    await stage.until(lambda: stage.context.buffer_budget.used > begun, "they have begun")
    await asyncio.sleep(0.05)
    assert (await stage.ask(None, "/health")).status == 200


async def test_the_liveness_page_reports_missed_deadlines(make_stage, internal_port) -> None:
    stage = await make_stage({}, internal_port=internal_port)
    assert (await stage.ask(None, "/livez")).status == 404, "it is no client's business"
    stage.gateway.port = internal_port
    assert (await stage.ask(None, "/health")).status == 503
    assert (await stage.ask(None, "/livez")).body == b"ok\n"
    for task in stage.gateway._tasks:
        task.cancel()
    await asyncio.sleep(0)
    stage.context.last_tick_at -= 6
    assert (await stage.ask(None, "/livez")).status == 503
