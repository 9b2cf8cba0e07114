"""An OpenAI client that measures token times. Used by measurements and load generators.

What is hard: in every case (an error, a timeout, Ctrl-C) the connection must be closed, which makes
the engine abort the request, so that nothing keeps running there.
"""

import asyncio
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from cleave.profiling.errors import ProfilingError
from cleave.profiling.http_client import HttpResponseError, OnEvents, TimedHttpExchange

_DONE = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class TimedCompletion:
    """A streamed completion. Times in seconds of the event loop's clock."""

    sent_s: float
    token_s: tuple[float, ...]
    """Arrival time of each token's event."""
    num_tokens: int
    """The engine's own count; larger than the number of events if one held several tokens."""

    @property
    def ttft_ms(self) -> float:
        """Time from sending the request to the first token."""
        return (self.token_s[0] - self.sent_s) * 1e3

    @property
    def latency_ms(self) -> float:
        """Time from sending the request to the last token."""
        return (self.token_s[-1] - self.sent_s) * 1e3


@dataclass(frozen=True)
class OpenAIClient:
    """A client of one engine or gateway."""

    url: str
    model: str = ""
    timeout_s: float = 120.0
    """Timeout of one response, from connecting to its end."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of each request, such as one with a key."""
    _address: tuple[str, int, bool] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Raises ProfilingError when `url` is invalid."""
        object.__setattr__(self, "_address", _parse_url(self.url))

    async def get(self, path: str) -> bytes:
        """GET a path; the body. Raises ProfilingError."""
        exchange = await self._send("GET", path, b"", None)
        if exchange.status != HTTPStatus.OK:
            message = _find_error_message(exchange.body)
            raise ProfilingError(
                f"{self.url}{path} answers with status {exchange.status}: {message}"
            )
        return bytes(exchange.body)

    async def get_json(self, path: str) -> dict[str, Any]:
        """GET a path; the JSON object. Raises ProfilingError."""
        try:
            body = json.loads(await self.get(path))
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise ProfilingError(f"{self.url}{path} answers with no JSON object")
        return body

    async def complete(
        self, prompt: Sequence[int], output_tokens: int, on_events: OnEvents | None = None
    ) -> TimedCompletion:
        """Stream exactly `output_tokens` tokens; `on_events` is called as they arrive. Raises
        ProfilingError when the response is an error or has another length."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        payload = json.dumps(body).encode()
        exchange = await self._send("POST", "/v1/completions", payload, on_events)
        return _read_completion(self.url, exchange, output_tokens)

    async def _send(
        self, method: str, path: str, payload: bytes, on_events: OnEvents | None
    ) -> TimedHttpExchange:
        host, port, secure = self._address
        prefix = urlsplit(self.url).path.rstrip("/")
        own = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        head = (
            f"{method} {prefix}{path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n{own}\r\n"
        )
        exchange = TimedHttpExchange(head.encode() + payload, on_events)
        loop = asyncio.get_running_loop()
        tls = ssl.create_default_context() if secure else None
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(self.timeout_s):
                transport, _ = await loop.create_connection(lambda: exchange, host, port, ssl=tls)
                await exchange.done
        except TimeoutError:
            raise ProfilingError(f"{self.url} has not answered in {self.timeout_s:.0f} s") from None
        except HttpResponseError as error:
            raise ProfilingError(f"{self.url}: {error}") from error
        except OSError as error:
            raise ProfilingError(f"{self.url} cannot be reached: {error}") from error
        finally:
            exchange.done.cancel()
            if isinstance(transport, asyncio.Transport):
                transport.abort()
        return exchange


def _parse_url(url: str) -> tuple[str, int, bool]:
    try:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
    except ValueError as error:
        raise ProfilingError(f"{url!r} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ProfilingError(f"{url!r} is no URL; give one such as http://127.0.0.1:8000")
    return parts.hostname, port, secure


def _read_completion(url: str, exchange: TimedHttpExchange, output_tokens: int) -> TimedCompletion:
    events = bytes(exchange.body).split(b"\n\n")
    if exchange.status != 200:
        message = _find_error_message(exchange.body)
        raise ProfilingError(f"{url}: status {exchange.status}: {message}")
    if len(events) < 4 or events[-2] != _DONE:
        raise ProfilingError(f"{url}: the stream ended early: {_find_error_message(events[-2])}")
    # The last two events are the usage and the end marker.
    usage = json.loads(events[-3].removeprefix(b"data: ")).get("usage") or {}
    tokens = usage.get("completion_tokens", 0)
    if tokens != output_tokens:
        raise ProfilingError(f"{url}: {tokens} tokens came where {output_tokens} were asked for")
    return TimedCompletion(exchange.sent_s, tuple(exchange.event_s[:-2]), tokens)


def _find_error_message(body: bytes | bytearray) -> str:
    text = bytes(body).removeprefix(b"data: ").decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:200] or "no reason given"
