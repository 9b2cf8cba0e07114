"""Sends requests of a batch to a gateway. Used by `batch_run`.

Each request has a connection of its own, so that several gateways behind one address get equal
shares.
"""

import asyncio
import errno
import socket
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from cleave.batch.batch_file import BatchLine
from cleave.batch.reply import Reply, read_retry_after
from cleave.rpc.http_client import HttpError, open_response

_UNREACHABLE = (None, errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH)
"""asyncio's error for a name with several addresses has no number."""


class EndpointError(ValueError):
    """The URL of the gateway cannot be used."""


@dataclass(frozen=True, slots=True)
class BatchClient:
    """A gateway, or any server of OpenAI's API."""

    url: str
    """Without a path."""
    api_key: str | None
    timeout_s: float
    """For one request, its wait for capacity included."""
    tls: ssl.SSLContext | None

    async def send(self, line: BatchLine) -> Reply:
        """Send one request; errors of the connection are part of the reply."""
        headers = {"Content-Type": "application/json", "X-Request-Id": line.request_id}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                open_response(
                    "POST",
                    self.url + line.path,
                    seconds=self.timeout_s,
                    body=line.body,
                    headers=headers,
                    tls=self.tls,
                ) as response,
            ):
                body = await response.read()
        except TimeoutError:
            return Reply(fault=f"no answer within {self.timeout_s:g} s")
        except HttpError as error:
            return Reply(fault=str(error), is_unreachable=_is_unreachable(error.__cause__))
        request_id = response.headers.get("x-request-id", line.request_id)
        retry_after_s = read_retry_after(response.headers.get("retry-after"))
        return Reply(response.status, body, request_id, retry_after_s)


def make_client(endpoint: str, api_key: str | None, timeout_s: float) -> BatchClient:
    """A client for a URL with or without `/v1`. Raises EndpointError."""
    url = endpoint.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.path
        is_usable = is_usable and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable:
        raise EndpointError(f"{endpoint!r} must be a URL such as http://127.0.0.1:8080")
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    return BatchClient(url, api_key, timeout_s, tls)


def _is_unreachable(cause: BaseException | None) -> bool:
    """Whether no connection was made, so that no server has seen the request."""
    # A certificate or a server without TLS: found out before the request is sent.
    return isinstance(cause, socket.gaierror | ssl.SSLError) or (
        isinstance(cause, OSError) and cause.errno in _UNREACHABLE
    )
