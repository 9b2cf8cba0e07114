"""HTTP requests of the agent to engines: probes and the requests of the KV test.

Without TLS, as engines speak plain HTTP inside the cluster. Bodies are held in memory.
"""

import asyncio
import json
from dataclasses import dataclass

from cleave.rpc.http_client import HttpError, open_response

__all__ = ["EngineResponse", "HttpError", "request"]

_BODY_LIMIT = 8 << 20


@dataclass(frozen=True, slots=True)
class EngineResponse:
    """Response of an engine."""

    status: int
    body: bytes
    first_body_ms: float
    """From sending the request to the first byte of the response body."""


async def request(
    method: str,
    url: str,
    payload: object = None,
    *,
    seconds: float,
    headers: dict[str, str] | None = None,
) -> EngineResponse:
    """Send a request and read its response within `seconds`. Raises HttpError."""
    body = b"" if payload is None else json.dumps(payload).encode()
    fields = {"Content-Type": "application/json", **(headers or {})}
    clock = asyncio.get_running_loop().time
    try:
        async with (
            asyncio.timeout(seconds),
            open_response(method, url, seconds=seconds, body=body, headers=fields) as response,
        ):
            content = await response.read(_BODY_LIMIT)
            first_at = clock() if response.body_at is None else response.body_at
            return EngineResponse(response.status, content, (first_at - response.sent_at) * 1000)
    except TimeoutError:
        raise HttpError(f"no answer within {seconds:g} s") from None
