"""A small HTTP client over asyncio, for agents to engines, gateways to the API server, and the
operator to gateways.

A hundred lines instead of a library because 64 agents share a small machine, where aiohttp or httpx
would add 8 MB and 0.15 s of CPU to each. One connection per request; bodies are read incrementally,
so that an endless one (a watch) can be streamed. What is hard: every truncation of a response must
be an error, otherwise half a list would be taken for the complete one.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from string import hexdigits
from urllib.parse import urlsplit

MAX_BODY_BYTES = 64 << 20
_MAX_LINE_BYTES = 1 << 16
_READ_BYTES = 1 << 16
_HEADER_END = b"\r\n\r\n"


class HttpError(RuntimeError):
    """No usable response: refused, truncated, too late, too large, or not HTTP."""


class Response:
    """A response whose head has been read."""

    def __init__(
        self, status: int, fields: Mapping[str, str], sent_at: float, reader: asyncio.StreamReader
    ) -> None:
        self.status = status
        self.headers = fields
        """Header fields; names in lower case."""
        self.sent_at = sent_at
        """When the request had been written, in seconds of the event loop's clock."""
        self.body_at: float | None = None
        """When the first part of the body arrived, on the same clock; None: not yet."""
        self._reader = reader

    async def iter_bytes(self) -> AsyncGenerator[bytes, None]:
        """The body in parts as they arrive. Raises HttpError when it is truncated."""
        with _map_errors():
            async with contextlib.aclosing(self._iter_body()) as pieces:
                async for piece in pieces:
                    if self.body_at is None:
                        self.body_at = asyncio.get_running_loop().time()
                    yield piece

    async def read(self, limit: int = MAX_BODY_BYTES) -> bytes:
        """The complete body. Raises HttpError when it is truncated or longer than `limit` bytes."""
        with _map_errors():
            if _parse_length(self.headers.get("content-length", "0"), 10) > limit:
                raise HttpError("response too large")
        body = bytearray()
        async with contextlib.aclosing(self.iter_bytes()) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > limit:
                    raise HttpError("response too large")
        return bytes(body)

    async def iter_lines(self, limit: int = MAX_BODY_BYTES) -> AsyncGenerator[bytes, None]:
        """The lines of the body as they arrive, at most `limit` bytes each. Raises HttpError."""
        rest = bytearray()
        async with contextlib.aclosing(self.iter_bytes()) as pieces:
            async for piece in pieces:
                rest += piece
                if b"\n" in piece:
                    *complete, last = bytes(rest).split(b"\n")
                    rest = bytearray(last)
                    for line in complete:
                        yield line
                elif len(rest) > limit:
                    raise HttpError("line too long")

    def _iter_body(self) -> AsyncGenerator[bytes, None]:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            return self._iter_chunked()
        if "content-length" in self.headers:
            return self._iter_exactly(_parse_length(self.headers["content-length"], 10))
        return self._iter_until_eof()

    async def _iter_until_eof(self) -> AsyncGenerator[bytes, None]:
        while piece := await self._reader.read(_READ_BYTES):
            yield piece

    async def _iter_exactly(self, length: int) -> AsyncGenerator[bytes, None]:
        while length > 0:
            piece = await self._reader.read(min(length, _READ_BYTES))
            if not piece:
                raise EOFError("response truncated")
            length -= len(piece)
            yield piece

    async def _iter_chunked(self) -> AsyncGenerator[bytes, None]:
        while size := _parse_length(
            (await self._reader.readuntil(b"\r\n")).decode("latin-1").partition(";")[0].strip(), 16
        ):
            async for piece in self._iter_exactly(size):
                yield piece
            await self._reader.readexactly(2)


@contextlib.asynccontextmanager
async def open_response(
    method: str,
    url: str,
    *,
    seconds: float,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    server_name: str | None = None,
) -> AsyncIterator[Response]:
    """Send a request and wait at most `seconds` for the head of the response, not for its body.
    `tls`: required for an https URL; `server_name`: expected in its certificate instead of the
    host. Raises HttpError."""
    writer: asyncio.StreamWriter | None = None
    try:
        with _map_errors(seconds):
            target = urlsplit(url)
            async with asyncio.timeout(seconds):
                reader, writer = await asyncio.open_connection(
                    target.hostname,
                    target.port or (443 if tls else 80),
                    ssl=tls,
                    server_hostname=(server_name or target.hostname) if tls else None,
                    limit=_MAX_LINE_BYTES,
                )
                _enable_keepalive(writer)
                path = f"{target.path or '/'}{'?' if target.query else ''}{target.query}"
                head = _build_head(method, path, target.netloc, len(body), headers or {})
                writer.write(head + body)
                await writer.drain()
                response = await _read_head(reader)
        yield response
    finally:
        if writer is not None:
            # Not close(): over TLS that would wait for the peer, which may be unreachable.
            writer.transport.abort()


async def get(url: str, *, seconds: float, limit: int = MAX_BODY_BYTES) -> bytes:
    """GET a URL within `seconds`; its body. Raises HttpError, also if the status is not 200."""
    with _map_errors(seconds):
        async with asyncio.timeout(seconds), open_response("GET", url, seconds=seconds) as response:
            body = await response.read(limit)
    if response.status != 200:
        raise HttpError(f"{url} answers {response.status}")
    return body


@contextlib.contextmanager
def _map_errors(seconds: float | None = None) -> Iterator[None]:
    """Convert all errors of a connection to HttpError."""
    try:
        yield
    except TimeoutError:
        within = "in time" if seconds is None else f"within {seconds:g} s"
        raise HttpError(f"no answer {within}") from None
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise HttpError(str(error) or type(error).__name__) from error


def _enable_keepalive(writer: asyncio.StreamWriter) -> None:
    """Make the kernel detect within 25 s that the peer is unreachable, even on a silent watch."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def _build_head(method: str, path: str, host: str, size: int, headers: Mapping[str, str]) -> bytes:
    fields = {"Host": host, "Connection": "close", "Content-Length": str(size), **headers}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _read_head(reader: asyncio.StreamReader) -> Response:
    sent_at = asyncio.get_running_loop().time()
    lines = (await reader.readuntil(_HEADER_END)).decode("latin-1").split("\r\n")
    protocol, _, rest = lines[0].partition(" ")
    if not protocol.startswith("HTTP/"):
        raise ValueError("response is not HTTP")
    pairs = (line.partition(":") for line in lines[1:] if line)
    fields = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return Response(_parse_length(rest[:3], 10), fields, sent_at, reader)


def _parse_length(text: str, base: int) -> int:
    """A number without a sign. Raises ValueError: with one, a body would look complete."""
    if not text or text.strip(hexdigits):
        raise ValueError("response is not HTTP")
    return int(text, base)
