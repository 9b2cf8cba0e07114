import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from cleave.local.chat import ask
from cleave.local.errors import ChatError

Serve = Callable[[bytes], Awaitable[str]]
BODY = {"model": "m", "messages": []}


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts servers that give one answer to everything; returns their URL."""
    servers: list[asyncio.Server] = []

    async def start(answer: bytes) -> str:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            await reader.readexactly(length)
            writer.write(answer)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()
        await server.wait_closed()


def stream(*events: object) -> bytes:
    texts = (event if isinstance(event, str) else json.dumps(event) for event in events)
    body = "".join(f"data: {text}\n\n" for text in texts)
    return f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n{body}".encode()


def piece(text: str | None) -> dict[str, object]:
    return {"choices": [{"delta": {"content": text}}]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}


async def test_pieces_are_shown_as_they_come_and_counted_by_the_engine(serve: Serve) -> None:
    shown: list[str] = []
    url = await serve(stream(piece(""), piece("Hel"), piece("lo"), USAGE, "[DONE]"))
    answer = await ask(url, BODY, shown.append)
    assert shown == ["Hel", "lo"]
    assert (answer.text, answer.prompt_tokens, answer.output_tokens) == ("Hello", 7, 2)
    assert answer.ttft_ms > 0


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (stream(piece("x"), USAGE), "ended before its end mark"),
        (stream(USAGE, "[DONE]"), "no text"),
        (stream({"error": {"message": "engine lost"}}), "engine lost"),
        (
            b'HTTP/1.1 503 X\r\nContent-Length: 34\r\n\r\n{"error": {"message": "no engine"}}',
            "status 503",
        ),
        (b"", "127.0.0.1"),
    ],
)
async def test_an_answer_that_is_none_is_said_so(
    serve: Serve, answer: bytes, complaint: str
) -> None:
    with pytest.raises(ChatError, match=complaint):
        await ask(await serve(answer), BODY, lambda _: None)
