"""Requests of a batch over HTTP, and what is made of broken connections."""

import asyncio

import pytest

from cleave.batch.batch_client import EndpointError, make_client
from cleave.batch.batch_file import BatchLine

from tests.support.doubles import Answering

LINE = BatchLine(1, "a", "/v1/completions", b'{"model":"m"}')
OK = b"HTTP/1.1 200 OK\r\nx-request-id: req-7\r\ncontent-length: 2\r\n\r\n{}"
BUSY = b"HTTP/1.1 429 Busy\r\nretry-after: 3\r\ncontent-length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://gateway:8080/v1/", "http://gateway:8080"),
        ("https://[::1]/v1", "https://[::1]"),
    ],
)
def test_the_url_may_end_with_the_version(endpoint, url) -> None:
    client = make_client(endpoint, None, 1.0)
    assert client.url == url
    assert (client.tls is not None) == url.startswith("https")


@pytest.mark.parametrize(
    "endpoint", ["gateway:8080", "ftp://gateway", "http://", "http://g:99999", "http://g/a/v1", ""]
)
def test_what_is_no_url_of_a_gateway_is_refused(endpoint) -> None:
    with pytest.raises(EndpointError, match="must be a URL such as"):
        make_client(endpoint, None, 1.0)


async def test_a_request_has_key_and_id_and_its_answer_is_read() -> None:
    async with Answering() as answering:
        client = make_client(await answering(OK), "secret", 30.0)
        reply = await client.send(LINE)
    assert (reply.status, reply.body, reply.request_id) == (200, b"{}", "req-7")
    (head,) = answering.requests
    assert head.startswith(b"POST /v1/completions HTTP/1.1")
    assert b"Authorization: Bearer secret" in head
    assert b"X-Request-Id: " + LINE.request_id.encode() in head


async def test_a_refusal_says_when_to_come_back() -> None:
    async with Answering() as answering:
        reply = await make_client(await answering(BUSY), None, 30.0).send(LINE)
    assert (reply.status, reply.retry_after_s, reply.is_unreachable) == (429, 3.0, False)


async def test_a_connection_that_breaks_is_not_one_that_was_never_made() -> None:
    async with Answering() as answering:
        url = await answering(OK[:-1])
        broken = await make_client(url, None, 30.0).send(LINE)
    away = await make_client(url, None, 30.0).send(LINE)
    assert (broken.status, broken.is_unreachable) == (0, False)
    assert (away.status, away.is_unreachable) == (0, True)
    assert broken.fault
    assert away.fault


async def test_without_tls_at_the_other_side_no_request_was_sent() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as plain:
        port = plain.sockets[0].getsockname()[1]
        reply = await make_client(f"https://127.0.0.1:{port}", None, 30.0).send(LINE)
    assert (reply.status, reply.is_unreachable) == (0, True)
    assert "SSL" in reply.fault


async def test_no_answer_in_time_is_a_fault() -> None:
    async with Answering() as answering:
        client = make_client(await answering(OK[:20], stay=True), None, 0.1)
        reply = await client.send(LINE)
    assert (reply.status, reply.is_unreachable) == (0, False)
    assert "within 0.1 s" in reply.fault
