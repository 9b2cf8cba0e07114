"""What a client of a translated request receives, byte by byte, and what it does to the engine."""

import asyncio
import json
from collections.abc import Sequence

import pytest

from cleave.gateway.http.buffer_budget import BufferBudget
from cleave.gateway.http.error_dialects import MESSAGES_PATH
from cleave.gateway.http.errors import GatewayError
from cleave.gateway.proxy.translated_client import TranslatedClient
from cleave.gateway.translation.chat_types import MAX_TOOL_CALLS
from cleave.gateway.translation.messages_answer import MessagesAnswer
from cleave.gateway.translation.responses_answer import ResponsesAnswer
from cleave.gateway.upstream.collected_answer import MAX_DECODED_BYTES

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-request-id: r\r\n\r\n"
EVENT = b'data: {"id":"chatcmpl-1","model":"m","choices":[{"delta":{"content":"a"}}]}\n\n'
NESTED = b"[" * 3_000, b"]" * 3_000
ASK = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
MESSAGES = MESSAGES_PATH.decode()


class Recorded:
    """A client that keeps what is written to it."""

    def __init__(self, chunked: bool) -> None:
        self.chunked = chunked
        self.keep_alive = chunked
        self.blocked = False
        self.data = b""
        self.ended: list[bool] = []

    def write(self, data: bytes) -> None:
        self.data += data

    def write_pieces(self, pieces: Sequence[bytes | memoryview]) -> None:
        self.data += b"".join(pieces)

    def end(self, reusable: bool) -> None:
        self.ended.append(reusable)

    def drop(self) -> None:
        self.data = b"dropped"


def decode_chunks(body: bytes) -> bytes:
    """The content of a chunked body that came to its end."""
    content = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        if size == b"0":
            assert body == b"\r\n"
            return content
        content += body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


@pytest.mark.parametrize("chunked", [True, False], ids=["HTTP/1.1", "HTTP/1.0"])
def test_a_stream_is_framed_as_the_client_understands(chunked: bool) -> None:
    client = Recorded(chunked)
    translated = TranslatedClient(client, MessagesAnswer(), BufferBudget(1 << 20))
    assert not translated.chunked
    assert translated.keep_alive is chunked
    translated.write(HEAD + EVENT)
    translated.write(EVENT + b"data: [DONE]\n\n")
    translated.end(reusable=True)
    head, _, body = client.data.partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in head) is chunked
    assert b"x-request-id: r" in head
    events = decode_chunks(body) if chunked else body
    assert events.count(b'"text":"a"') == 2
    assert events.endswith(b'data: {"type":"message_stop"}\n\n')
    assert client.ended == [True]


def test_a_whole_response_may_come_in_pieces() -> None:
    client = Recorded(True)
    translated = TranslatedClient(client, MessagesAnswer(), BufferBudget(1 << 20))
    body = json.dumps({"choices": [{"message": {"content": "a" * 20_000}}]}).encode()
    translated.write(b"HTTP/1.1 200 OK\r\nx: y\r\ncontent-length: %d\r\n\r\n" % len(body))
    assert client.data == b""
    translated.write(body[:100])
    translated.write(body[100:])
    translated.end(reusable=False)
    head, _, answer = client.data.partition(b"\r\n\r\n")
    assert head == b"HTTP/1.1 200 OK\r\nx: y\r\ncontent-length: %d" % len(answer)
    assert json.loads(answer)["content"][0]["text"] == "a" * 20_000
    assert client.ended == [False]


def test_backpressure_and_drops_pass_through() -> None:
    client = Recorded(True)
    translated = TranslatedClient(client, MessagesAnswer(), BufferBudget(1 << 20))
    assert not translated.blocked
    client.blocked = True
    assert translated.blocked
    translated.drop()
    assert client.data == b"dropped"


async def test_what_is_no_chat_is_an_engine_error(single) -> None:
    async def nonsense(engine, request, writer) -> None:
        engine.send(writer, 200, b"nonsense")

    single.engines["x"].script = nonsense
    response = await single.ask(ASK, MESSAGES)
    assert (response.status, response.error["type"]) == (502, "api_error")
    response = await single.ask({"model": "m", "input": "a"}, "/v1/responses")
    assert (response.status, response.error["code"]) == (502, "engine_error")
    await single.until_idle()


async def test_a_connection_serves_several_apis_in_turn(single) -> None:
    client = await single.connect()
    for path, body in (
        (MESSAGES, ASK),
        ("/v1/completions", {"model": "m", "prompt": "a"}),
        ("/v1/responses", {"model": "m", "input": "a", "stream": True}),
        (MESSAGES, ASK | {"stream": True}),
    ):
        assert (await client.ask(body, path)).status == 200
    await single.until_idle()


async def test_an_engine_lacks_the_path_that_counts_tokens(single) -> None:
    async def refuse(engine, request, writer) -> None:
        engine.send(writer, 404, b'{"detail":"Not Found"}')

    single.engines["x"].script = refuse
    response = await single.ask(ASK, "/v1/messages/count_tokens")
    assert (response.status, response.json()["type"]) == (501, "error")


@pytest.mark.parametrize("path", [MESSAGES, "/v1/messages/count_tokens"])
async def test_errors_before_a_body_is_read_have_the_clients_form_too(make_stage, path) -> None:
    stage = await make_stage({"x": "mixed"}, max_body_bytes=1_000)
    response = await stage.ask(b"[" * 1_001, path)
    assert response.status == 413
    assert response.json()["type"] == "error"
    assert response.error["type"] == "request_too_large"


async def test_the_access_log_names_the_clients_path(make_stage, caplog) -> None:
    stage = await make_stage({"x": "mixed"}, access_log=True)
    with caplog.at_level("INFO"):
        await stage.ask(ASK, MESSAGES)
        await stage.until_idle()
    assert any(MESSAGES in str(vars(record)) for record in caplog.records)


@pytest.mark.parametrize("whole", ["long", "calls", "choices"])
def test_an_answer_that_would_take_long_to_translate_is_an_error(whole: str) -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": "{}"}}
    choice = {"message": {"content": "a" * (MAX_DECODED_BYTES if whole == "long" else 1)}}
    if whole == "calls":
        choice = {"message": {"tool_calls": [call] * (MAX_TOOL_CALLS + 1)}}
    body = json.dumps({"choices": [choice] * (1 + (whole == "choices"))}).encode()
    client = Recorded(chunked=True)
    translated = TranslatedClient(client, MessagesAnswer(), BufferBudget(1 << 20))
    head = b"HTTP/1.1 200 OK\r\nx-request-id: r\r\ncontent-length: %d\r\n\r\n"
    translated.write(head % len(body) + body)
    translated.end(reusable=True)
    head, _, body = client.data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 502 ")
    assert ("stream it" in json.loads(body)["error"]["message"]) is (whole == "long")


async def demand_system_first(engine, request, writer) -> None:
    """As the templates of many models do."""
    roles = [message["role"] for message in request.body["messages"]]
    if "system" in roles[1:] or "impossible" in str(request.body["messages"]):
        message = "System message must be at the beginning."
        error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
        engine.send_json(writer, {"error": error}, status=400)
    else:
        message = {"role": "assistant", "content": request.body["messages"][0]["content"]}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
        chat = {"id": "chatcmpl-1", "model": "m", "choices": [choice], "usage": usage}
        engine.send_json(writer, chat)


LATE = [
    {"role": "user", "content": "hi"}, {"role": "system", "content": "be brief"},
    {"role": "user", "content": "go on"},
]  # fmt: skip


@pytest.mark.parametrize("path", [MESSAGES, "/v1/responses"])
async def test_where_a_template_demands_it_system_messages_are_merged(single, path: str) -> None:
    engine = single.engines["x"]
    engine.script = demand_system_first
    ask = {"model": "m", "max_tokens": 9, "system": "be kind", "messages": LATE}
    if path != MESSAGES:
        ask = {"model": "m", "instructions": "be kind", "input": LATE}
    client = await single.connect()
    for number in (2, 3):
        answer = (await client.ask(ask, path)).json()
        content = (answer["content"] if path == MESSAGES else answer["output"][0]["content"])[0]
        assert content["text"] == "be kind\n\nbe brief"
        assert len(engine.requests) == number, "the second one is merged at once"
    sent = [message["role"] for message in engine.requests[-1].body["messages"]]
    assert sent == ["system", "user", "user"]
    await single.until_idle()


async def test_one_instance_says_that_the_template_does_not_switch_thinking_off(single) -> None:
    engine = single.engines["x"]
    engine.script = demand_system_first
    client = await single.connect()
    for always in (False, True):
        single.state(engine, always_thinks=always)
        answer = await client.ask(ASK | {"thinking": {"type": "disabled"}}, MESSAGES)
        assert answer.status == 200
    sent = [request.body["reasoning_effort"] for request in engine.requests]
    assert sent == ["none", "low"]


async def test_what_is_refused_for_another_reason_is_sent_twice_at_most(single) -> None:
    engine = single.engines["x"]
    engine.script = demand_system_first
    refused = ASK | {"messages": [*LATE, {"role": "user", "content": "impossible"}]}
    client = await single.connect()
    for late, number in ((refused, 2), (ASK | {"system": "impossible"}, 1)):
        engine.requests.clear()
        answer = await client.ask(late, MESSAGES)
        assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        assert len(engine.requests) == number
    assert not single.context.system_first
    await single.until_idle()


STREAMS = [(MESSAGES, ASK | {"stream": True}),
           ("/v1/responses", {"model": "m", "input": "a", "stream": True})]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), STREAMS)
async def test_a_stream_that_cannot_be_translated_ends_at_once(single, path, body) -> None:
    """Its engine is given up, which would go on."""

    async def nest(engine, request, writer) -> None:
        engine.send_stream_head(writer)
        engine.send_chunk(writer, EVENT)
        engine.send_chunk(writer, EVENT.replace(b'"delta"', b'"x":%b0%b,"delta"' % NESTED))
        await writer.drain()
        await asyncio.sleep(60)

    single.engines["x"].script = nest
    response = await single.ask(body, path)
    assert response.status == 200
    assert b"cannot be translated" in response.body
    await single.until_idle()
    assert single.context.buffer_budget.used == 0


async def test_a_client_that_leaves_frees_what_its_stream_has_kept(single) -> None:
    async def say_much(engine, request, writer) -> None:
        engine.send_stream_head(writer)
        for _ in range(30):
            engine.send_chunk(writer, EVENT.replace(b'"a"', b'"%b"' % (b"a" * 3_000)))
            await writer.drain()
        await asyncio.sleep(60)

    single.engines["x"].script = say_much
    client = await single.connect()
    client.send(STREAMS[1][1], STREAMS[1][0])
    budget = single.context.buffer_budget
    await single.until(lambda: budget.used >= 64 << 10, "kept")
    client.writer.transport.abort()
    await single.until_idle()
    await single.until(lambda: budget.used == 0, "freed")


def test_a_stream_for_whose_texts_there_is_no_room_fails() -> None:
    client = Recorded(chunked=True)
    translated = TranslatedClient(client, ResponsesAnswer({}, {}), BufferBudget(20 << 10))
    translated.write(HEAD)
    events = EVENT.replace(b'"a"', b'"%b"' % (b"a" * 1_000)) * 40
    with pytest.raises(GatewayError, match="--max-buffered"):
        translated.write(events)
    translated.end(reusable=False)
    assert b"event: response.failed" in client.data
    decode_chunks(client.data.partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize("answer", [MessagesAnswer(), ResponsesAnswer({}, {})])
def test_a_stream_whose_end_never_came_ends_with_an_error(answer) -> None:
    client = Recorded(chunked=True)
    translated = TranslatedClient(client, answer, BufferBudget(1 << 20))
    translated.write(HEAD + EVENT)
    translated.end(reusable=True)
    assert b"cannot be translated" in client.data
