"""Shared test doubles: a manual clock, and servers with one fixed response."""

import asyncio
import contextlib
import re
from typing import Self

_TLS = b"\x16"
"""First byte of a TLS handshake."""


class Clock:
    """Returns the time that a test has set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Answering:
    """HTTP servers on loopback, each with one fixed response to all requests, valid or not."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        """The heads of all received requests, in order."""
        self._servers: list[asyncio.Server] = []
        self._served: set[asyncio.Task[None] | None] = set()

    async def __call__(self, *pieces: bytes, stay: bool = False) -> str:
        """Start a server that sends `pieces` and closes unless `stay` is set; return its URL."""

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._served.add(asyncio.current_task())
            with contextlib.suppress(ConnectionError, EOFError):
                head = await reader.readexactly(1)
                if head != _TLS:
                    head += await reader.readuntil(b"\r\n\r\n")
                self.requests.append(head)
                length = re.search(rb"(?i)content-length: *(\d+)", head)
                await reader.readexactly(int(length[1]) if length else 0)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.01)
                if stay:
                    await reader.read()
            writer.transport.abort()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        self._servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for server in self._servers:
            server.close()
        await asyncio.gather(*filter(None, self._served))
        await asyncio.sleep(0)
