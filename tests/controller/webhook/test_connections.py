"""Silent clients of the webhook's port do not keep the API server out, nor fill the memory."""

import asyncio
import ssl

import aiohttp
import pytest

from cleave.controller.webhook import connections, server

from tests.controller.webhook.test_server import REVIEW, Shelf, serving, trusting

HEAD = b"POST /validate HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"


async def open_tls(url: str, shelf: Shelf) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("localhost", port_of(url), ssl=trusting(shelf))


def port_of(url: str) -> int:
    return int(url.split(":")[2].split("/")[0])


async def is_answered(url: str, context: ssl.SSLContext) -> bool:
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json=REVIEW, ssl=context) as answer,
    ):
        return answer.status == 200


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)
    return 8


@pytest.mark.parametrize("kind", ["handshake", "head", "body"])
async def test_requests_are_answered_while_silent_clients_hold_all_connections(
    monkeypatch: pytest.MonkeyPatch, few: int, kind: str
) -> None:
    monkeypatch.setattr(server, "_TIMEOUT_S", 0.5)
    shelf = Shelf()
    async with serving(shelf, monkeypatch) as (url, _):
        silent = []
        for _ in range(3 * few):
            if kind == "handshake":
                silent.append(await asyncio.open_connection("localhost", port_of(url)))
                continue
            silent.append(await open_tls(url, shelf))
            if kind == "body":
                silent[-1][1].write(HEAD % (4 << 20))
        await asyncio.sleep(0.1)
        assert await is_answered(url, trusting(shelf))
        for reader, _ in silent[: few + 1]:
            # The oldest have ended.
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await asyncio.wait_for(reader.readexactly(1), 5)
        for _, writer in silent:
            writer.transport.abort()


async def test_a_body_that_does_not_come_is_given_up_and_few_large_ones_are_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "_TIMEOUT_S", 0.5)
    shelf = Shelf()
    async with serving(shelf, monkeypatch) as (url, _):
        held = [await open_tls(url, shelf) for _ in range(12)]
        for _, writer in held:
            writer.write(HEAD % (2 << 20) + b" " * (1 << 20))
        assert await is_answered(url, trusting(shelf))
        for reader, writer in held:
            assert b" 503 " in await asyncio.wait_for(reader.readline(), 5)
            writer.transport.abort()


async def test_many_values_are_refused_before_they_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shelf = Shelf()
    body = b"[" + b"{}," * 60_000 + b"{}]"
    async with (
        serving(shelf, monkeypatch) as (url, _),
        aiohttp.ClientSession() as session,
        session.post(url, data=body, ssl=trusting(shelf)) as answer,
    ):
        assert answer.status == 400
        assert "more than 100000 values" in await answer.text()


async def test_a_request_is_not_ended_for_new_connections(
    monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    shelf = Shelf()
    async with serving(shelf, monkeypatch) as (url, _):
        reader, writer = await open_tls(url, shelf)
        writer.write(HEAD % 2 + b"{")
        await asyncio.sleep(0.1)
        others = [await open_tls(url, shelf) for _ in range(2 * few)]
        writer.write(b"}")
        assert b" 400 " in await asyncio.wait_for(reader.readline(), 5)
        for _, other in [(reader, writer), *others]:
            other.transport.abort()
