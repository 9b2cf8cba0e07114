"""Clients of streams that wait: comments, and what becomes of the response after the first."""

import asyncio
import json

import pytest

from cleave.gateway.http.buffer_budget import BufferBudget
from cleave.gateway.proxy import proxied_request
from cleave.gateway.proxy.translated_client import TranslatedClient
from cleave.gateway.proxy.waiting_client import send_comment
from cleave.gateway.translation.messages_answer import MessagesAnswer

from tests.gateway.failover.test_retry_policy import fail
from tests.gateway.proxy.test_translated_client import EVENT, Recorded, decode_chunks

STREAM = {"model": "m", "prompt": "hello", "max_tokens": 3, "stream": True}
COMMENT = b": keep-alive"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
REFUSAL = (
    b'HTTP/1.1 400 Bad Request\r\ncontent-length: 33\r\n\r\n{"error":\n{"message":"too long"}}'
)


@pytest.fixture
def quick(monkeypatch) -> None:
    monkeypatch.setattr(proxied_request, "WAIT_S", 0.3)
    monkeypatch.setattr(proxied_request, "SILENCE_S", 0.4)


async def wait_for_comment(client) -> None:
    data = b""
    while COMMENT not in data:
        data += await asyncio.wait_for(client.reader.read(4_096), 20)
    assert data.startswith(b"HTTP/1.1 200"), data


def slowly(then, delay_s: float = 1.0):
    async def script(engine, request, writer) -> None:
        await asyncio.sleep(delay_s)
        await then(engine, request, writer)

    return script


async def refuse(engine, request, writer) -> None:
    error = {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}
    engine.send_json(writer, {"error": error}, status=400)


async def say_slowly(engine, request, writer) -> None:
    engine.send_stream_head(writer)
    for word in ("one", "two"):
        engine.send_chunk(writer, engine.event(word))
        await writer.drain()
        await asyncio.sleep(1.0)
    engine.send_chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")


@pytest.mark.interpreted
async def test_a_stream_that_waits_and_pauses_has_comments(single, quick) -> None:
    single.engines["x"].script = slowly(say_slowly)
    response = await single.ask(STREAM)
    assert (response.status, response.headers["x-accel-buffering"]) == (200, "no")
    assert response.events[0] == COMMENT
    event = single.engines["x"].event
    plain = [each for each in response.events if each != COMMENT]
    assert plain == [event("one").strip(), event("two").strip(), b"data: [DONE]"]
    assert response.events.index(plain[0]) < len(response.events) - response.events[::-1].index(
        COMMENT
    ), "there are some within the stream, too"
    await single.until_idle()


@pytest.mark.interpreted
async def test_an_answer_that_pauses_has_comments_though_its_prompt_had_none(
    single, monkeypatch
) -> None:
    monkeypatch.setattr(proxied_request, "SILENCE_S", 0.3)
    single.engines["x"].script = say_slowly
    events = (await single.ask(STREAM)).events
    assert events[0] == single.engines["x"].event("one").strip()
    assert COMMENT in events


@pytest.mark.interpreted
@pytest.mark.parametrize("script", [refuse, fail])
async def test_an_error_after_a_comment_is_an_event(single, quick, script) -> None:
    single.engines["x"].script = slowly(script)
    client = await single.connect()
    response = await client.ask(STREAM)
    assert (response.status, response.events[0]) == (200, COMMENT)
    error = json.loads(response.events[-1].removeprefix(b"data: "))["error"]
    assert error["message"]
    assert (await client.ask(None, "/health")).status == 200, "the connection goes on"
    await single.until_idle()


@pytest.mark.interpreted
async def test_another_engine_goes_on_after_a_comment(make_stage, quick) -> None:
    stage = await make_stage({"a": "mixed", "b": "mixed"})
    for engine in stage.engines.values():
        engine.script = slowly(fail)
        break
    response = await stage.ask(STREAM)
    assert response.events[-1] == b"data: [DONE]"
    assert not any(b"error" in event for event in response.events)


@pytest.mark.interpreted
async def test_what_is_not_streamed_gets_no_comment(single, quick) -> None:
    single.engines["x"].script = slowly(refuse)
    response = await single.ask(STREAM | {"stream": False})
    assert response.status == 400
    assert response.error["message"] == "too long"


@pytest.mark.interpreted
async def test_a_client_that_leaves_while_it_waits_ends_the_request(single, quick) -> None:
    single.engines["x"].script = slowly(say_slowly, 600)
    client = await single.connect()
    client.send(STREAM)
    await wait_for_comment(client)
    client.writer.transport.abort()
    await single.until_idle()
    assert single.engines["x"].requests[0].cut


@pytest.mark.parametrize("chunked", [True, False], ids=["HTTP/1.1", "HTTP/1.0"])
def test_comments_are_framed_as_the_client_understands(chunked: bool) -> None:
    client = Recorded(chunked)
    waiting = send_comment(client, b"r", has_begun=False)
    assert send_comment(waiting, b"r", has_begun=False) is waiting
    waiting.write(REFUSAL.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
    waiting.write(REFUSAL.partition(b"\r\n\r\n")[2])
    waiting.end(reusable=True)
    head, _, body = client.data.partition(b"\r\n\r\n")
    assert (b"connection: close" in head) is not chunked
    content = decode_chunks(body) if chunked else body
    assert content == (COMMENT + b"\n\n") * 2 + b'data: {"error": {"message":"too long"}}\n\n'
    assert client.ended == [True]


@pytest.mark.parametrize("chunked", [True, False], ids=["HTTP/1.1", "HTTP/1.0"])
@pytest.mark.parametrize("fails", [True, False])
def test_a_translated_stream_has_comments_and_its_own_errors(chunked: bool, fails: bool) -> None:
    client = Recorded(chunked)
    translated = TranslatedClient(client, MessagesAnswer(), BufferBudget(1 << 20))
    waiting = send_comment(translated, b"r", has_begun=False)
    waiting.write(REFUSAL if fails else HEAD + EVENT)
    if not fails:
        assert send_comment(waiting, b"r", has_begun=True) is waiting
        waiting.write(b"data: [DONE]\n\n")
    waiting.end(reusable=True)
    body = client.data.partition(b"\r\n\r\n")[2]
    events = (decode_chunks(body) if chunked else body).split(b"\n\n")
    assert events[0] == COMMENT
    names = [event.partition(b"\n")[0].removeprefix(b"event: ") for event in events[1:] if event]
    if fails:
        assert names == [b"error"]
    else:
        assert names == [
            b"message_start", b"content_block_start", b"content_block_delta", COMMENT,
            b"content_block_stop", b"message_delta", b"message_stop",
        ]  # fmt: skip
