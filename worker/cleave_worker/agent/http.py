"""The few HTTP requests an agent makes to engines: probes, and the requests of the KV test.

A client of 80 lines instead of a library because 64 agents share a small machine: aiohttp or httpx
would add 8 MB and 0.15 s of CPU to each. One connection per request, no TLS (engines speak plain
HTTP inside the cluster), bodies that fit in memory.
"""

import asyncio
import json
from dataclasses import dataclass
from urllib.parse import urlsplit

_BODY_LIMIT = 8 << 20


class HttpError(RuntimeError):
    """No usable answer: refused, cut off, too late, or not HTTP."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine said."""

    status: int
    body: bytes
    first_body_ms: float
    """From sending the request to the first byte of the body."""


async def request(
    method: str,
    url: str,
    payload: object = None,
    *,
    seconds: float,
    headers: dict[str, str] | None = None,
) -> Answer:
    """One request and its whole answer within `seconds`. Raises HttpError."""
    target = urlsplit(url)
    body = b"" if payload is None else json.dumps(payload).encode()
    head = _head(method, target.path or "/", target.netloc, len(body), headers or {})
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(
                target.hostname, target.port, limit=_BODY_LIMIT
            )
            try:
                writer.write(head + body)
                await writer.drain()
                return await _read(reader)
            finally:
                writer.close()
    except TimeoutError:
        raise HttpError(f"no answer within {seconds:g} s") from None
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        raise HttpError(str(error) or type(error).__name__) from error


def _head(method: str, path: str, host: str, length: int, headers: dict[str, str]) -> bytes:
    fields = {
        "Host": host,
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": str(length),
        **headers,
    }
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _read(reader: asyncio.StreamReader) -> Answer:
    clock = asyncio.get_running_loop().time
    sent = clock()
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    protocol, _, rest = lines[0].partition(" ")
    if not protocol.startswith("HTTP/"):
        raise ValueError("answer is not HTTP")
    status = int(rest[:3])
    fields = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines[1:] if line)
    }
    if fields.get("transfer-encoding", "").lower() == "chunked":
        first = await reader.readuntil(b"\r\n")
        first_ms = (clock() - sent) * 1000
        return Answer(status, await _chunks(reader, first), first_ms)
    if "content-length" in fields:
        length = int(fields["content-length"])
        if length > _BODY_LIMIT:
            raise ValueError("answer too large")
        body = await reader.readexactly(length)
    else:
        body = await reader.read(-1)
    return Answer(status, body, (clock() - sent) * 1000)


async def _chunks(reader: asyncio.StreamReader, size_line: bytes) -> bytes:
    body = bytearray()
    while size := int(size_line.split(b";")[0], 16):
        if len(body) + size > _BODY_LIMIT:
            raise ValueError("answer too large")
        body += await reader.readexactly(size)
        await reader.readexactly(2)
        size_line = await reader.readuntil(b"\r\n")
    return bytes(body)
