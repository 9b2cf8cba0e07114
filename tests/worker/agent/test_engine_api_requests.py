"""The small HTTP client."""

import pytest

from cleave.rpc.http_client import HttpError
from cleave_worker.agent import engine_api

from tests.support.doubles import Answering


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x\r\nllo\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nhello",
    ],
)
async def test_a_body_comes_in_three_framings(serve: Answering, answer: bytes) -> None:
    response = await engine_api.request("GET", await serve(answer), seconds=10)
    assert (response.status, response.body) == (200, b"hello")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhel",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
)
async def test_a_broken_answer_is_an_error(serve: Answering, answer: bytes) -> None:
    with pytest.raises(HttpError):
        await engine_api.request("GET", await serve(answer), seconds=10)


async def test_silence_is_an_error_after_the_time_out(serve: Answering) -> None:
    url = await serve(b"HTTP/1.1 200 OK\r\n...", stay=True)
    with pytest.raises(HttpError, match="within"):
        await engine_api.request("GET", url, seconds=0.1)


async def test_a_closed_port_is_an_error() -> None:
    with pytest.raises(HttpError):
        await engine_api.request("GET", "http://127.0.0.1:1", seconds=10)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", ""),
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 6\r\n\r\nlength", "400: b'length'"),
    ],
)
async def test_a_first_request_that_is_refused_is_reported(
    serve: Answering, answer: bytes, fault: str
) -> None:
    assert await engine_api.warm_up(await serve(answer), "m", seconds=10) == fault
