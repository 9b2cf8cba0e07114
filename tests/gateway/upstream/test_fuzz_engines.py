"""From any bytes of an engine the client gets an answer of its API or an error; nothing raises.

For a long run: pytest tests/gateway/upstream/test_fuzz_engines.py --hypothesis-profile=long
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.ambiguous_requests import build
from tests.support.fuzzed_gateway import THOROUGH, FuzzedGateway, run_gateway

GOOD = b'{"choices":[{"text":"one"}],"usage":{"prompt_tokens":7,"completion_tokens":1}}'
EVENTS = b'data: {"choices":[{"text":"one"}]}\n\ndata: [DONE]\n\n'
REFUSAL = b'{"error":{"message":"no","code":400}}'
SECRET = b"header-of-an-engine"


class ScriptedEngine:
    """Sends the same bytes for each request, then closes the connection."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.prompts: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            for piece in self.pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        with contextlib.suppress(ConnectionError):
            writer.close()


@pytest.fixture(scope="module")
def gateway() -> Iterator[FuzzedGateway]:
    with run_gateway(ScriptedEngine(), access_log=True) as fuzzed_gateway:
        yield fuzzed_gateway


NUMBERS = [
    b"0",
    b"7",
    b"-1",
    b"0" * 5_000 + b"5",
    b"9" * 19,
    b"9" * 400,
    b"1e999",
    b"0x5",
    b"NaN",
    b"",
    b"\xff",
]
STATUSES = [b"200"] * 8 + [
    b"%03d" % n for n in (0, 99, 100, 101, 103, 201, 204, 206, 299, 301, 304, 400, 401)
]
STATUSES += [
    b"404",
    b"405",
    b"418",
    b"429",
    b"450",
    b"499",
    b"500",
    b"503",
    b"599",
    b"600",
    b"999",
    b"20",
    b"2000",
    b"-1",
]
TYPES = (
    [b"application/json"] * 4
    + [b"text/event-stream"] * 4
    + [b"text/html", b"", b"application/json\xff", b"a" * 9_000]
)
NAMES = [
    b"content-length",
    b"transfer-encoding",
    b"connection",
    b"upgrade",
    b"location",
    b"set-cookie",
    b"retry-after",
]
NAMES += [
    b"content-encoding",
    b"metadata",
    b"trailer",
    b"date",
    b"x-request-id",
    b"keep-alive",
    b"te",
    b"h\xff",
    b"",
]
VALUES = [
    *NUMBERS,
    b"chunked",
    b"gzip, chunked",
    b"close",
    b"keep-alive",
    b"h2c",
    SECRET,
    b"a" * 9_000,
    b"\t",
    b"\r",
    b"\0",
]

numbers = st.sampled_from(NUMBERS) | st.integers().map(lambda n: b"%d" % n)
texts = st.text(max_size=20).map(lambda text: json.dumps(text).encode())
scalars = (
    numbers | texts | st.sampled_from([b"null", b"true", b"[]", b"{}", b"[" * 3_000, b'"\\ud800"'])
)
members = st.sampled_from(
    [b"choices", b"usage", b"error", b"detail", b"id", b"kv_transfer_params", b"type", b"model"]
)
inner = st.lists(
    st.tuples(
        members | st.just(b"prompt_tokens") | st.just(b"code") | st.just(b"message"), scalars
    ),
    max_size=4,
)


def encode(pairs: list[tuple[bytes, bytes]]) -> bytes:
    return b"{" + b",".join(b'"%b":%b' % pair for pair in pairs) + b"}"


objects = st.lists(st.tuples(members, scalars | inner.map(encode)), max_size=4).map(encode)
bodies = (
    st.sampled_from([GOOD, GOOD, EVENTS, REFUSAL, b"<html>", b"", GOOD * 2])
    | objects
    | st.binary(max_size=60)
)
bodies |= objects.map(lambda body: b"data: " + body + b"\n\ndata: [DONE]\n\n")
lines = st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES) | st.binary(max_size=20)).map(
    lambda p: b"%b: %b" % p
)


@st.composite
def responses(draw: st.DrawFn) -> bytes:
    body, fields = (
        draw(bodies),
        [
            b"content-type: " + draw(st.sampled_from(TYPES)),
            *draw(st.lists(lines, max_size=draw(st.sampled_from([0, 0, 1, 2])))),
        ],
    )
    framing = draw(st.integers(0, 4))
    if framing < 3:
        fields.append(b"content-length: %d" % len(body))
    elif framing == 3:
        fields.append(b"transfer-encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if body else b"0\r\n\r\n"
    version = draw(st.sampled_from([b"HTTP/1.1"] * 8 + [b"HTTP/1.0", b"HTTP/2.0", b"ICY"]))
    raw = build(fields, body, b"%b %b X" % (version, draw(st.sampled_from(STATUSES))))
    return raw.replace(b"host: x\r\n", b"", 1)


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    raw = bytearray(
        b"".join(
            draw(
                st.sampled_from([1, 1, 1, 2]).flatmap(
                    lambda n: st.lists(responses(), min_size=n, max_size=n)
                )
            )
        )
    )
    for _ in range(draw(st.sampled_from([0, 0, 0, 0, 1, 2, 4]))):
        place = draw(st.integers(0, max(len(raw) - 1, 0)))
        match draw(st.integers(0, 3)):
            case 0:
                raw[place : place + 1] = draw(st.binary(min_size=1, max_size=1))
            case 1:
                raw.insert(place, draw(st.sampled_from(b'\r\n\0 :;{}"9\xff')))
            case 2:
                del raw[place : place + 1]
            case _:
                del raw[place:]
    return bytes(raw)


def check_answer(response: h11.Response, body: bytes, stream: bool) -> None:
    """A good answer, an engine's own refusal, or an error of the gateway's."""
    headers = dict(response.headers)
    assert SECRET not in b"".join(headers.values())
    assert not headers.keys() & {
        b"location",
        b"set-cookie",
        b"retry-after",
        b"content-encoding",
        b"upgrade",
    }
    if headers[b"content-type"].startswith(b"text/event-stream"):
        assert response.status_code == 200
        assert stream
        assert body.startswith((b"data:", b"event:", b"id:", b"retry:", b":"))
        return
    assert headers[b"content-type"] == b"application/json"
    answer = json.loads(body)
    if response.status_code == 200:
        assert not stream
        assert "choices" in answer
    else:
        assert response.status_code in (502, 503, 504) or 400 <= response.status_code < 500
        assert isinstance(answer["error"]["message"], str) or answer.get("type") == "error"


async def ask(port: int, raw: bytes) -> tuple[h11.Response, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    parser, body = h11.Connection(h11.CLIENT), b""
    parser.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    parser.send(h11.EndOfMessage())
    writer.write(raw)
    head = None
    while not isinstance(event := parser.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif event is h11.NEED_DATA:
            parser.receive_data(await reader.read(1 << 16))
    writer.close()
    assert head is not None
    return head, body


@settings(THOROUGH, max_examples=6 * settings.default.max_examples)
@given(spoilt(), st.booleans(), st.lists(st.integers(0, 400), max_size=3))
def test_any_bytes_of_an_engine_become_an_answer_or_an_error(
    gateway: FuzzedGateway, caplog, raw, stream, places
) -> None:
    at = sorted({min(place, len(raw)) for place in places})
    gateway.engine.pieces = [raw[a:b] for a, b in zip([0, *at], [*at, len(raw)], strict=True)]
    body_sent = json.dumps(
        {"model": "m", "prompt": "a", "max_tokens": 3, "stream": stream}
    ).encode()
    request = build([b"content-length: %d" % len(body_sent)], body_sent)
    with caplog.at_level(logging.WARNING):
        response, body = gateway.run(asyncio.wait_for(ask(gateway.gateway.port, request), 30))
    check_answer(response, body, stream)
    assert not caplog.records, caplog.text
    context = gateway.gateway.context
    context.circuit_breaker.failure_states.clear()
    assert not context.active_requests
