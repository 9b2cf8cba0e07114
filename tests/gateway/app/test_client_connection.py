"""HTTP as clients speak it, well and badly."""

import asyncio
import json
import random

import pytest

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
STREAM = ASK | {"stream": True}
DONE = b"data: [DONE]\n\n"


async def test_a_connection_serves_one_request_after_another(single) -> None:
    client = await single.connect()
    for body in (ASK, STREAM, None, ASK):
        path = "/health" if body is None else "/v1/completions"
        assert (await client.ask(body, path)).status == 200
    assert single.engines["x"].connections == 1, "the engine's connection is kept as well"


async def test_pipelined_requests_are_answered_in_order_one_at_a_time(single) -> None:
    running = most = 0

    async def count(engine, request, writer):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        engine.send_json(writer, {"choices": [], "echo": request.body["prompt"]})
        running -= 1

    single.engines["x"].script = count
    client = await single.connect()
    client.writer.write(b"".join(client.build(ASK | {"prompt": str(i)}) for i in range(10)))
    answers = [(await client.read()).json()["echo"] for _ in range(10)]
    assert answers == [str(i) for i in range(10)]
    assert most == 1


async def test_a_request_that_arrives_during_another_waits_for_it(single) -> None:
    client = await single.connect()

    async def slow(engine, request, writer):
        await engine.stream(writer, ["t"] * 5, pause_s=0.02)

    single.engines["x"].script = slow
    client.send(STREAM)
    await client.read_head()
    second = client.build(STREAM)
    client.writer.write(second[:30])
    await asyncio.sleep(0.02)
    client.writer.write(second[30:])
    while await client.read_chunk():
        pass
    assert len((await client.read()).events) == 6


async def test_a_request_may_arrive_byte_by_byte(single) -> None:
    client = await single.connect()
    for byte in client.build(ASK):
        client.writer.write(bytes([byte]))
        await asyncio.sleep(0)
    assert (await client.read()).status == 200
    assert single.engines["x"].requests[0].body == ASK


@pytest.mark.parametrize("seed", range(10))
async def test_requests_cut_anywhere_are_all_answered(single, seed: int) -> None:
    rng = random.Random(seed)
    client = await single.connect()
    kinds = [client.build(ASK), client.build(STREAM), client.build(None, "/health"), chunked(rng)]
    sent = [rng.choice(kinds) for _ in range(12)]
    raw = b"".join(sent)

    async def write() -> None:
        position = 0
        while position < len(raw):
            step = rng.randrange(1, 90)
            client.writer.write(raw[position : position + step])
            await asyncio.sleep(0)
            position += step

    writing = asyncio.create_task(write())
    assert [(await client.read()).status for _ in sent] == [200] * 12, f"seed {seed}"
    await writing
    await single.until_idle()


def chunked(rng: random.Random) -> bytes:
    body, pieces = json.dumps(ASK).encode(), b""
    while body:
        size = rng.randrange(1, 20)
        pieces += b"%x;ext=1\r\n%b\r\n" % (len(body[:size]), body[:size])
        body = body[size:]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: g\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + pieces + b"0\r\nX-Trailer: t\r\n\r\n"


async def test_a_chunked_body_is_read(single) -> None:
    client = await single.connect()
    client.writer.write(chunked(random.Random(0)))
    assert (await client.read()).status == 200
    assert single.engines["x"].requests[0].body == ASK


async def test_a_client_that_expects_100_continue_gets_it(single) -> None:
    client = await single.connect()
    raw = client.build(ASK, Expect="100-continue")
    head, _, body = raw.partition(b"\r\n\r\n")
    client.writer.write(head + b"\r\n\r\n")
    assert (await client.read_head())[0] == 100
    client.writer.write(body)
    assert (await client.read()).status == 200


async def test_a_refused_request_gets_no_100_continue(single) -> None:
    client = await single.connect()
    head = client.build(ASK, "/nowhere", Expect="100-continue").partition(b"\r\n\r\n")[0]
    client.writer.write(head + b"\r\n\r\n")
    assert (await client.read()).status == 404
    assert await client.is_closed()


async def test_an_unknown_expectation_is_refused(single) -> None:
    assert (await single.ask(ASK, Expect="miracles")).status == 417


async def test_a_body_that_is_announced_too_large_is_refused_unread(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, max_body_bytes=1_000)
    client = await stage.connect()
    client.writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1001\r\n\r\n{")
    response = await client.read()
    assert (response.status, response.error["code"]) == (413, "body_too_large")
    assert await client.is_closed()


async def test_a_body_that_grows_too_large_is_refused(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, max_body_bytes=1_000)
    client = await stage.connect()
    client.writer.write(b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(30):
        client.writer.write(b"64\r\n" + b"x" * 100 + b"\r\n")
    assert (await client.read()).status == 413
    assert not stage.engines["x"].requests


async def test_a_client_still_sending_its_large_body_can_read_the_refusal(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, max_body_bytes=1_000)
    client = await stage.connect()
    size = 8 << 20
    client.writer.write(b"POST /v1/completions HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % size)
    client.writer.write(b"x" * size)
    await client.writer.drain()
    assert (await client.read()).status == 413


async def test_a_body_of_the_largest_size_passes(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, max_body_bytes=4 << 20)
    body = ASK | {"prompt": "x" * ((4 << 20) - 1_000)}
    assert (await stage.ask(body)).status == 200
    assert stage.engines["x"].requests[0].body == body


@pytest.mark.parametrize("form", ["one header", "many headers", "url", "never ends"])
async def test_a_head_that_is_too_long_is_refused(single, form: str) -> None:
    client = await single.connect()
    big = b"x" * 70_000
    match form:
        case "one header":
            raw = b"GET /health HTTP/1.1\r\nA: " + big + b"\r\n\r\n"
        case "many headers":
            raw = b"GET /health HTTP/1.1\r\n" + b"A: bcdefghij\r\n" * 7_000 + b"\r\n"
        case "url":
            raw = b"GET /" + big + b" HTTP/1.1\r\n\r\n"
        case _:
            raw = b"GET /health HTTP/1.1\r\nA: " + big
    client.writer.write(raw)
    response = await client.read()
    assert response.status == 431
    assert await client.is_closed()


@pytest.mark.parametrize(
    "raw",
    [
        b"NONSENSE\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
        b"POST / HTTP/1.1\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=lambda raw: repr(raw[:60]),
)
async def test_what_is_not_http_is_refused_and_the_connection_closed(single, raw: bytes) -> None:
    client = await single.connect()
    client.writer.write(raw)
    response = await client.read()
    assert response.status == 400
    assert response.error["type"] == "invalid_request_error"
    assert await client.is_closed()


async def test_garbage_after_a_request_does_not_cost_its_answer(single) -> None:
    client = await single.connect()
    client.writer.write(client.build(ASK) + b"\x00garbage\r\n\r\n")
    assert (await client.read()).status == 200
    assert (await client.read()).status == 400
    assert await client.is_closed()


async def test_garbage_is_refused_once_even_when_more_comes_at_that_moment(single, caplog) -> None:
    client = await single.connect()
    await single.until(lambda: bool(single.context.clients), "it is connected")
    (connection,) = single.context.clients
    # The first part is answered at once; what follows comes before the loop turns to the garbage.
    connection.data_received(client.build(ASK, "/nowhere") + b"\x00garbage")
    connection.data_received(b"more")
    assert (await client.read()).status == 404
    assert (await client.read()).status == 400
    assert await client.is_closed()
    assert not caplog.records


@pytest.mark.parametrize("seed", range(20))
async def test_no_garbage_breaks_the_gateway(single, seed: int) -> None:
    rng = random.Random(seed)
    client = await single.connect()
    raw = bytearray(client.build(ASK) * 3)
    for _ in range(rng.randrange(1, 12)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    client.writer.write(bytes(raw))
    client.writer.write_eof()
    await asyncio.wait_for(client.reader.read(), 10)
    assert (await single.ask(ASK)).status == 200, f"seed {seed}"
    await single.until_idle()


async def test_connection_close_is_honoured(single) -> None:
    client = await single.connect()
    response = await client.ask(ASK, Connection="close")
    assert response.headers["connection"] == "close"
    assert await client.is_closed()


async def test_an_old_client_gets_a_stream_without_chunks(single) -> None:
    client = await single.connect()
    client.writer.write(client.build(STREAM).replace(b"HTTP/1.1", b"HTTP/1.0"))
    status, headers = await client.read_head()
    body = await asyncio.wait_for(client.reader.read(), 10)
    assert status == 200
    assert "transfer-encoding" not in headers
    assert body.endswith(b"data: [DONE]\n\n")


async def test_an_offer_to_upgrade_is_ignored(single) -> None:
    client = await single.connect()
    upgrade = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": "h2c", "HTTP2_Settings": "AAM"}
    for body in (ASK, ASK):
        assert (await client.ask(body, **upgrade)).status == 200


async def test_a_query_does_not_hide_the_path(single) -> None:
    assert (await single.ask(ASK, "/v1/completions?api-version=1")).status == 200


async def test_a_slow_reader_holds_the_engine_back_and_loses_nothing(single) -> None:
    """What the client does not take must not pile up here."""
    sent = 0
    piece = b"x" * 50_000
    count = 1_000

    async def flood(engine, request, writer):
        nonlocal sent
        engine.send_stream_head(writer)
        for _ in range(count):
            engine.send_chunk(writer, b"data: " + piece + b"\n\n")
            sent += 1
            await writer.drain()
        engine.send_chunk(writer, DONE)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    single.engines["x"].script = flood
    client = await single.connect()
    client.send(STREAM)
    await client.read_head()
    last = -1
    while sent != last:
        last = sent
        await asyncio.sleep(0.2)
    assert sent < count * 0.8, "the engine was held back"
    received = 0
    while data := await client.read_chunk():
        received += len(data)
    assert received == count * (len(piece) + 8) + len(DONE)
    await single.until_idle()


async def test_a_client_that_takes_nothing_for_too_long_is_dropped(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, idle_s=0.3)

    async def flood(engine, request, writer):
        engine.send_stream_head(writer)
        while True:
            engine.send_chunk(writer, b"data: " + b"x" * 50_000 + b"\n\n")
            await writer.drain()

    stage.engines["x"].script = flood
    client = await stage.connect()
    client.send(STREAM)
    await stage.until(lambda: bool(stage.engines["x"].requests), "it runs")
    await stage.until_idle()
    assert stage.context.metrics.requests == {("m", "cancelled"): 1}


async def test_a_request_that_never_completes_is_dropped(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, idle_s=0.3)
    client = await stage.connect()
    client.writer.write(client.build(ASK)[:-5])
    assert (await client.read()).status == 408
    assert await client.is_closed()


async def test_a_head_that_drips_in_too_slowly_is_dropped(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, idle_s=0.5)
    client = await stage.connect()
    client.writer.write(b"GET /health HTTP/1.1\r\n")

    async def drip() -> None:
        while True:
            client.writer.write(b"A: b\r\n")
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    assert (await client.read()).status == 408
    dripping.cancel()


async def test_an_idle_connection_is_closed_after_a_while(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, keep_alive_s=0.3)
    client = await stage.connect()
    assert (await client.ask(ASK)).status == 200
    assert await client.is_closed()


async def test_more_clients_than_allowed_are_turned_away(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, max_clients=2)
    opened = stage.hold()
    first, second = [await stage.connect() for _ in range(2)]
    first.send(ASK)
    second.send(ASK)
    await stage.until(lambda: len(stage.engines["x"].requests) == 2, "both run")
    assert await (await stage.connect()).is_closed()
    opened.set()
    assert (await first.read()).status == (await second.read()).status == 200
    assert (await stage.ask(ASK)).status == 200


async def test_a_large_answer_is_sent_as_the_client_takes_it(single) -> None:
    text = "x" * (20 << 20)

    async def answer_much(engine, request, writer) -> None:
        engine.send_json(writer, {"choices": [{"text": text}], "usage": {"prompt_tokens": 1}})

    single.engines["x"].script = answer_much
    client = await single.connect()
    client.writer.transport.pause_reading()
    client.send(ASK)
    client.send(ASK | {"prompt": "second"})
    await single.until(lambda: len(single.engines["x"].requests) == 1, "it is served")
    (connection,) = single.context.clients
    await single.until(lambda: connection.blocked, "the client is known to be slow")
    assert connection.transport.get_write_buffer_size() < 4 << 20, "the rest waits"
    assert single.context.buffer_budget.used > 10 << 20, "and counts"
    assert len(single.engines["x"].requests) == 1, "the second one waits for the first answer"
    single.engines["x"].script = None
    client.writer.transport.resume_reading()
    assert (await client.read()).json()["choices"][0]["text"] == text
    assert (await client.read()).status == 200
    await single.until(lambda: single.context.buffer_budget.used == 0, "nothing is kept")


async def test_an_answer_that_is_not_taken_is_given_up(make_stage) -> None:
    stage = await make_stage({"x": "mixed"}, keep_alive_s=0.5)

    async def answer_much(engine, request, writer) -> None:
        answer = {"choices": [{"text": "x" * (20 << 20)}], "usage": {"prompt_tokens": 1}}
        engine.send_json(writer, answer)

    stage.engines["x"].script = answer_much
    client = await stage.connect()
    client.writer.transport.pause_reading()
    client.send(ASK)
    await stage.until(lambda: bool(stage.context.clients), "it is connected")
    await stage.until(lambda: not stage.context.clients, "it is closed")
    assert stage.context.buffer_budget.used == 0
