"""Engines that answer wrongly: none of that passes for an answer; the error says what they did."""

import asyncio
import json

import pytest

from cleave.gateway.app.routes import OTHER_ROUTES

ASK = {"model": "m", "prompt": "hello", "max_tokens": 3}
STREAM = ASK | {"stream": True}
GOOD = b'{"choices":[{"text":"one"}],"usage":{"prompt_tokens":7,"completion_tokens":1}}'
EVENT = b'data: {"choices":[{"text":"one"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def build(
    body: bytes = GOOD,
    status: bytes = b"200 OK",
    kind: bytes = b"application/json",
    *lines: bytes,
    length: int | None = -1,
) -> bytes:
    """A response; `length` None: it has no length and ends with its connection."""
    fields = [b"content-type: " + kind] if kind else []
    if length is not None:
        fields.append(b"content-length: %d" % (len(body) if length < 0 else length))
    return b"\r\n".join([b"HTTP/1.1 " + status, *fields, *lines, b"", body])


def stream(*events: bytes, kind: bytes = b"text/event-stream; charset=utf-8") -> bytes:
    body = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in events) + b"0\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % kind
    return head + body


def send(raw: bytes, *, closes: bool = False):
    async def script(engine, request, writer) -> None:
        writer.write(raw)
        await writer.drain()
        if closes:
            writer.close()

    return script


LOCATION = b"location: http://evil.example/v1"
DEEP = b'{"choices":[],"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"

BROKEN = {
    "a redirect": build(b"", b"302 Found", b"", LOCATION),
    "a redirect with a good body": build(
        GOOD, b"307 Temporary Redirect", b"application/json", LOCATION
    ),
    "not modified": build(b"", b"304 Not Modified", b""),
    "no content": build(b"", b"204 No Content", b""),
    "a part": build(GOOD, b"206 Partial Content"),
    "created": build(GOOD, b"201 Created"),
    "a page": build(b"<html>It works!</html>", kind=b"text/html"),
    "JSON as a page": build(GOOD, kind=b"text/html"),
    "no type": build(GOOD, kind=b""),
    "an odd type": build(GOOD, kind=b"application/json\xff"),
    "another type": build(GOOD, kind=b"application/jsonp"),
    "nothing": build(b""),
    "half": build(GOOD[:40]),
    "half that ends with a brace": build(b'{"choices":[{"text":"one"}'),
    "no object": build(b"[]"),
    "no completion": build(b"{}"),
    "an error as success": build(b'{"error":{"message":"boom","code":500}}'),
    "two objects": build(GOOD + GOOD),
    "not UTF-8": build(b'\xff\xfe{"choices":[]}'),
    "no number": build(b'{"choices":[{"logprob":NaN}]}'),
    "too deep": build(DEEP),
    "too many tokens": build(
        b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":%b}}' % (b"9" * 400)
    ),
    "negative tokens": build(b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":-5}}'),
    "a stream that was not requested": stream(EVENT, DONE),
    "too short a length": build(GOOD, length=10),
    "two answers": build() * 2,
    "an answer and the beginning of another": build() + b"HTTP/1.1 2",
    "an answer and a line end": build() + b"\r\nHTTP/1.1 200 OK\r\n",
    "status 099": build(GOOD, b"099 X"),
    "status 600": build(GOOD, b"600 X"),
    "status 999": build(GOOD, b"999 X"),
    "an unknown status with a page": build(b"<html>", b"499 X", b"text/html"),
    "a refusal that is a page": build(b"<html>no</html>", b"404 Not Found", b"text/html"),
    "half a refusal": build(b'{"error":{"mess', b"400 Bad Request"),
    "another protocol": b"SSH-2.0-OpenSSH_9.6\r\n",
    "an upgrade": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
    "a folded header": build(GOOD, b"200 OK", b"application/json", b"a: b\r\n c"),
    "both lengths": build(GOOD, b"200 OK", b"application/json", b"transfer-encoding: chunked"),
}
CLOSED = {
    "half without a length": build(GOOD[:40], length=None),
    "all without a length": build(length=None),
    "too long a length": build(GOOD, length=500),
    "no head": b"",
    "half a head": b"HTTP/1.1 200 OK\r\ncontent-ty",
    "half a chunk": stream(GOOD, kind=b"application/json")[:150],
}
BROKEN_STREAMS = {
    "JSON": build(),
    "a page": build(b"<html>\n\n</html>\n\n", kind=b"text/html"),
    "a page as a stream": stream(b"<html>\n\n", b"</html>\n\n"),
    "JSON as a stream": stream(GOOD, b"\n\n"),
    "nothing": stream(),
    "only an end": stream(DONE),
    "a redirect": build(b"", b"302 Found", b"", LOCATION),
    "no content": build(b"", b"204 No Content", b""),
}


async def check_refusal(stage, ask: dict) -> None:
    """One error of the gateway's, which names what the engine did, and nothing of the engine's."""
    response = await stage.ask(ask)
    assert response.status == 502, response
    assert response.error["code"] == "engine_error"
    assert "instance x " in response.error["message"]
    assert "failed this request" not in response.error["message"]
    assert "location" not in response.headers
    assert b"<html" not in response.body
    await stage.until_idle()


@pytest.mark.parametrize("kind", BROKEN)
async def test_what_is_no_answer_is_not_passed_on(single, caplog, kind: str) -> None:
    single.engines["x"].script = send(BROKEN[kind])
    await check_refusal(single, ASK)
    assert not caplog.records


@pytest.mark.parametrize("kind", CLOSED)
async def test_an_answer_that_its_connection_cuts_is_none(single, kind: str) -> None:
    single.engines["x"].script = send(CLOSED[kind], closes=True)
    await check_refusal(single, ASK)


@pytest.mark.parametrize("kind", BROKEN_STREAMS)
async def test_what_is_no_stream_is_not_passed_on(single, kind: str) -> None:
    single.engines["x"].script = send(BROKEN_STREAMS[kind])
    await check_refusal(single, STREAM)


@pytest.mark.parametrize("kind", ["a redirect", "a page", "half", "two answers", "status 999"])
async def test_another_engine_answers_instead(make_stage, kind: str) -> None:
    stage = await make_stage({"x": "mixed", "y": "mixed"})
    stage.engines["x"].script = send(BROKEN[kind])
    for _ in range(3):
        assert (await stage.ask(ASK)).status == 200
    await stage.until_idle()


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_a_translated_answer_is_checked_as_well(single, path: str) -> None:
    single.engines["x"].script = send(BROKEN["a redirect"])
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}
    body = {"model": "m"} | ({"input": "a"} if "responses" in path else chat)
    response = await single.ask(body, path)
    assert response.status == 502
    assert "instance x answered with status 302" in response.json()["error"]["message"]
    assert ("type" in response.json()) == (path == "/v1/messages")


async def test_an_engine_that_cannot_be_reached_is_named(single) -> None:
    await single.engines["x"].stop()
    response = await single.ask(ASK)
    assert (response.status, response.error["code"]) == (502, "engine_error")
    assert "instance x cannot be reached" in response.error["message"]
    await single.engines["x"].start()


async def test_a_head_without_an_end_is_given_up(single) -> None:
    """Before its time is over, which is two minutes."""

    async def go_on(engine, request, writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        for _ in range(100):
            writer.write(b"a: b\r\n" * 1_000)
            await writer.drain()

    single.engines["x"].script = go_on
    await check_refusal(single, ASK)


async def test_framing_of_an_answer_without_an_end_is_given_up(single) -> None:
    async def go_on(engine, request, writer) -> None:
        writer.write(
            stream(EVENT)[: -len(b"0\r\n\r\n")].replace(b"text/event-stream", b"application/json")
        )
        writer.write(b"0\r\na: ")
        for _ in range(100):
            writer.write(b"b" * 10_000)
            await writer.drain()

    single.engines["x"].script = go_on
    await check_refusal(single, ASK)


async def test_interim_responses_without_an_end_are_given_up(single) -> None:
    async def go_on(engine, request, writer) -> None:
        for _ in range(10_000):
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)
            await writer.drain()

    single.engines["x"].script = go_on
    await check_refusal(single, ASK)


async def test_only_known_headers_of_engines_reach_clients(single) -> None:
    lines = (
        b"set-cookie: a=b",
        b"location: /x",
        b"connection: x-y",
        b"x-y: z",
        b"via: q",
        b"alt-svc: h3",
    )
    lines += (
        b"access-control-allow-origin: *",
        b"www-authenticate: Basic",
        b"retry-after: 99999999999999",
    )
    single.engines["x"].script = send(build(GOOD, b"200 OK", b"application/json", *lines))
    response = await single.ask(ASK)
    assert (response.status, response.body) == (200, GOOD)
    known = {"content-type", "content-length", "x-request-id", "x-cleave-decode"}
    assert set(response.headers) == known
    single.engines["x"].script = send(
        build(b'{"error":{"message":"no"}}', b"400 Bad", b"application/json", *lines)
    )
    response = await single.ask(ASK)
    assert (response.status, response.error["message"]) == (400, "no")
    assert set(response.headers) < known


async def test_the_bytes_of_an_embedding_and_their_description_pass(single) -> None:
    lines = b'metadata: {"id":"e"}', b"set-cookie: a=b"
    single.engines["x"].script = send(
        build(b"\x00\xff" * 8, b"200 OK", b"application/octet-stream", *lines)
    )
    response = await single.ask({"model": "m", "input": "a"}, "/v1/embeddings")
    assert (response.status, response.body) == (200, b"\x00\xff" * 8)
    assert response.headers["metadata"] == '{"id":"e"}'
    assert "set-cookie" not in response.headers


@pytest.mark.parametrize("route", OTHER_ROUTES, ids=lambda route: route.path.decode())
async def test_usual_answers_of_all_other_paths_pass_as_they_are(single, route) -> None:
    """As vLLM's response classes: an object, with or without usage; bytes of embeddings."""
    fields = dict.fromkeys(route.required, "a") | {"model": "m"}
    bodies = [b'{"data":[],"usage":{"prompt_tokens":3}}', b'{"tokens":[1,2]}', b'{"prompt":"a"}']
    kinds = [(b"application/json", body) for body in bodies]
    kinds += [(b"application/octet-stream", b"\0\x80")] * (
        route.path in (b"/v1/embeddings", b"/pooling")
    )
    for kind, body in kinds:
        single.engines["x"].script = send(build(body, kind=kind))
        response = await single.ask(fields, route.path.decode())
        assert (response.status, response.body) == (200, body)
        assert response.headers["content-type"] == kind.decode()


@pytest.mark.parametrize("body", [b"<html>", b"", b'{"data":', b"{}{}"])
async def test_other_paths_are_checked_as_well(single, body: bytes) -> None:
    for kind in (b"application/json", b"text/html"):
        single.engines["x"].script = send(build(body, kind=kind))
        response = await single.ask({"model": "m", "input": "a"}, "/v1/embeddings")
        assert (response.status, response.error["code"]) == (502, "engine_error")


@pytest.mark.parametrize(("end", "status"), [(b"", 200), (b"]", 502), (b" ", 502), (b"}x", 502)])
async def test_a_large_answer_is_checked_at_both_ends(single, end: bytes, status: int) -> None:
    usage = b'],"usage":{"prompt_tokens":7,"completion_tokens":5,"prompt_tokens_details":{"a":1}}}'
    choice = b'{"text":"%b"}' % (b"x" * (3 << 20))
    body = b'{"id":"c","choices":[' + choice + usage
    single.engines["x"].script = send(build(body[: len(body) - len(end)] + end))
    response = await single.ask(ASK)
    assert response.status == status
    if status == 200:
        assert single.context.metrics.models["m"].output_tokens == 5


async def test_an_engine_that_answers_with_an_unknown_status_in_its_own_form_is_quoted(
    make_stage,
) -> None:
    stage = await make_stage({"x": "mixed"}, access_log=True)
    body = json.dumps({"error": {"message": "out of tea", "code": 450}}).encode()
    stage.engines["x"].script = send(build(body, b"450 Tea"))
    response = await stage.ask(ASK)
    assert (response.status, response.error["message"]) == (450, "out of tea")
    leak = json.dumps({"error": {"message": "remote_engine_id boot", "code": 450}}).encode()
    stage.engines["x"].script = send(build(leak, b"450 Tea"))
    assert (await stage.ask(ASK)).error["message"] == "the engine refused the request"
    await stage.until_idle()


async def test_a_page_in_the_middle_of_answers_harms_no_other_request(make_stage) -> None:
    stage = await make_stage({"x": "mixed"})
    engine = stage.engines["x"]

    async def alternate(_, request, writer) -> None:
        if len(engine.requests) % 2:
            writer.write(BROKEN["two answers"])
        else:
            await engine.answer(request, writer)

    engine.script = alternate
    responses = await asyncio.gather(*(stage.ask(ASK) for _ in range(8)))
    assert {each.status for each in responses} <= {200, 502}
    for each in responses:
        assert each.status == 502 or each.json()["choices"] == [{"text": "one two three"}]
    await stage.until_idle()


@pytest.mark.parametrize("size", [3 << 20, 9 << 20])
async def test_an_event_that_is_too_long_is_computed_once(make_stage, size: int) -> None:
    stage = await make_stage({"x": "mixed", "y": "mixed", "z": "mixed"})

    async def send_much(engine, request, writer) -> None:
        engine.send_stream_head(writer)
        choice = {"index": 0, "text": "x" * size, "finish_reason": None}
        event = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        for at in range(0, len(event), 1 << 16):
            engine.send_chunk(writer, event[at : at + (1 << 16)])
            await writer.drain()
        engine.send_chunk(writer, DONE)
        writer.write(b"0\r\n\r\n")

    for engine in stage.engines.values():
        engine.script = send_much
    response = await stage.ask(STREAM)
    assert b"larger than the gateway buffers" in response.body
    assert b"[DONE]" not in response.body
    assert len(response.body) < 1_000
    assert sum(len(engine.requests) for engine in stage.engines.values()) == 1
    assert stage.context.metrics.retries == {("decode", "too_long"): 1}
    assert not stage.context.circuit_breaker.failure_states


HELD = {
    "an answer in two pieces": (ASK, GOOD[:-1] + b" " * 8_000, b"application/json"),
    "a long answer": (ASK, b'{"choices":[{"text":"' + b"x" * 100_000, b"application/json"),
    "an error without an end": (
        STREAM, b'data: {"error":{"message":"' + b"x" * 8_000, b"text/event-stream"
    ),
    "a long event": (STREAM, EVENT[:-4] + b"x" * 100_000, b"text/event-stream"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HELD)
async def test_what_is_held_of_an_answer_is_reserved_and_given_back(single, kind: str) -> None:
    ask, body, content_type = HELD[kind]
    budget, seen = single.context.buffer_budget, asyncio.Event()

    async def send_a_part(engine, request, writer) -> None:
        writer.write(build(body, b"200 OK", content_type, length=1_000_000))
        await seen.wait()
        writer.close()

    single.engines["x"].script = send_a_part
    call = asyncio.create_task(single.ask(ask))
    for _ in range(500):
        if budget.used > len(body) - 5_000:
            break
        await asyncio.sleep(0.02)
    assert budget.used > len(body) - 5_000
    seen.set()
    await call
    assert budget.used == 0
