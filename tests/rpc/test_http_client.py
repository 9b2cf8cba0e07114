"""The small HTTP client."""

import ssl

import pytest

from cleave.rpc import http_client

from tests.support.doubles import Answering


async def lines_of(url: str, limit: int = 1_000) -> list[bytes]:
    async with http_client.open_response("GET", url, seconds=10) as answer:
        return [line async for line in answer.iter_lines(limit)]


async def test_lines_come_whole_however_they_are_cut(serve: Answering) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    url = await serve(head, b"2\r\n", b"a", b"b\r\n", b"6\r\nc\nde\nf", b"\r\n1\r\n\n\r\n0\r\n\r\n")
    assert await lines_of(url) == [b"abc", b"de", b"f"]


async def test_a_stream_that_breaks_off_is_an_error_after_what_came(serve: Answering) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    url = await serve(head, b"2\r\na\n\r\n", b"9\r\nb")
    seen: list[bytes] = []

    async def read() -> None:
        async with http_client.open_response("GET", url, seconds=10) as answer:
            async for line in answer.iter_lines():
                seen.append(line)

    with pytest.raises(http_client.HttpError):
        await read()
    assert seen == [b"a"]


@pytest.mark.parametrize("url", ["http://[::/metrics", "http://h:99999999/", "http://h:x/"])
async def test_what_is_no_url_is_no_answer(url: str) -> None:
    with pytest.raises(http_client.HttpError):
        await lines_of(url)


async def test_a_line_without_end_is_refused(serve: Answering) -> None:
    url = await serve(b"HTTP/1.1 200 OK\r\nContent-Length: 99999\r\n\r\n", b"x" * 2_000, stay=True)
    with pytest.raises(http_client.HttpError, match="too long"):
        await lines_of(url, 1_000)


async def test_a_page_is_read_within_its_limits(serve: Answering) -> None:
    good = await serve(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")
    assert await http_client.get(good, seconds=10) == b"hello"
    with pytest.raises(http_client.HttpError, match="too large"):
        await http_client.get(good, seconds=10, limit=4)
    with pytest.raises(http_client.HttpError, match="too large"):
        await http_client.get(await serve(b"HTTP/1.0 200 OK\r\n\r\nhello"), seconds=10, limit=4)
    with pytest.raises(http_client.HttpError, match="answers 404"):
        await http_client.get(
            await serve(b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n"), seconds=10
        )
    slow = await serve(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel", stay=True)
    with pytest.raises(http_client.HttpError, match="within"):
        await http_client.get(slow, seconds=0.2)
    with pytest.raises(http_client.HttpError):
        await http_client.get("http://127.0.0.1:1", seconds=10)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 2x0 OK\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * (1 << 17),
    ],
)
async def test_what_is_not_http_is_an_error(serve: Answering, head: bytes) -> None:
    with pytest.raises(http_client.HttpError):
        await http_client.get(await serve(head), seconds=10)


async def test_a_server_without_tls_is_an_error_to_one_who_wants_it(serve: Answering) -> None:
    url = (await serve(b"HTTP/1.1 200 OK\r\n\r\n")).replace("http:", "https:")
    with pytest.raises(http_client.HttpError):
        async with http_client.open_response(
            "GET", url, seconds=10, tls=ssl.create_default_context()
        ):
            pass


@pytest.mark.parametrize("length", ["-5", "+5", "0x5", "", "5 5", "9" * 5_000, "\u0665"])
async def test_an_absurd_length_is_no_empty_page(serve: Answering, length: str) -> None:
    for head in (
        f"Content-Length: {length}\r\n\r\nhello",
        f"Transfer-Encoding: chunked\r\n\r\n{length}\r\nhello\r\n0\r\n\r\n",
    ):
        url = await serve(f"HTTP/1.1 200 OK\r\n{head}".encode())
        with pytest.raises(http_client.HttpError):
            await http_client.get(url, seconds=10)
