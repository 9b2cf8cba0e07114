import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.profiling.http_client import ChunkDecoder, HttpResponseError, TimedHttpExchange

EVENTS = [b"data: a\n\n", b"data: b\n\n", b"data: [DONE]\n\n"]


def chunked(parts: list[bytes]) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % len(data) for place in places), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(st.binary(min_size=1, max_size=40)), st.lists(st.integers(0, 10_000)))
def test_a_chunked_body_comes_out_whole_however_it_was_cut(
    parts: list[bytes], places: list[int]
) -> None:
    decoder = ChunkDecoder()
    out = b"".join(decoder.feed(piece) for piece in cut(chunked(parts), places))
    assert out == b"".join(parts)
    assert decoder.ended


def test_what_is_no_chunk_is_refused() -> None:
    with pytest.raises(HttpResponseError, match="malformed"):
        ChunkDecoder().feed(b"xyz\r\n")


@pytest.fixture
async def exchange() -> TimedHttpExchange:
    return TimedHttpExchange(b"")


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
async def test_every_event_of_a_stream_is_seen_once(exchange: TimedHttpExchange, step: int) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    data = head + chunked(EVENTS)
    for at in range(0, len(data), step):
        exchange.data_received(data[at : at + step])
    await exchange.done
    assert exchange.status == 200
    assert bytes(exchange.body) == b"".join(EVENTS)
    assert len(exchange.event_s) == 3


async def test_an_answer_with_a_length_ends_there(exchange: TimedHttpExchange) -> None:
    exchange.data_received(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno")
    await exchange.done
    assert (exchange.status, bytes(exchange.body)) == (404, b"no")


async def test_an_answer_without_a_length_ends_with_the_connection(
    exchange: TimedHttpExchange,
) -> None:
    exchange.data_received(b"HTTP/1.1 200 OK\r\n\r\nall")
    exchange.connection_lost(None)
    await exchange.done
    assert bytes(exchange.body) == b"all"


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nno",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200",
        b"",
    ],
)
async def test_a_connection_that_ends_early_is_an_error(
    exchange: TimedHttpExchange, data: bytes
) -> None:
    exchange.data_received(data)
    exchange.connection_lost(None)
    with pytest.raises(HttpResponseError, match="early"):
        await exchange.done


@pytest.mark.parametrize("data", [b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", b"\r\n\r\n"])
async def test_what_is_no_http_is_an_error(exchange: TimedHttpExchange, data: bytes) -> None:
    exchange.data_received(data)
    with pytest.raises(HttpResponseError, match="no HTTP"):
        await asyncio.wait_for(exchange.done, 1)
