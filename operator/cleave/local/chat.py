"""One streamed chat request to the gateway, with client-side latencies. Used by `cleave demo`."""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp

from cleave.local.errors import ChatError

_CONNECT_S = 5.0
_READ_S = 120.0
_MAX_LINE_BYTES = 1 << 20
"""Maximum line length in bytes; the first event may repeat the prompt as token ids."""


@dataclass(frozen=True, slots=True)
class ChatResponse:
    """The text of a streamed response and its latencies."""

    text: str
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float
    """(end - first token) / (output tokens - 1); 0 for a single token."""


async def send_chat_request(
    url: str, body: Mapping[str, Any], show: Callable[[str], None]
) -> ChatResponse:
    """Send `body` to the chat endpoint at `url`; calls `show` with each text. Raises ChatError."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S)
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    begin = time.perf_counter()
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, read_bufsize=_MAX_LINE_BYTES) as session,
            session.post(f"{url}/v1/chat/completions", json=request) as response,
        ):
            if response.status != HTTPStatus.OK:
                raise ChatError(_describe_error(response.status, await response.read()))
            return await _collect(_read_events(response), show, begin)
    # ValueError: a line that is too long, or no JSON.
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ChatError(f"{url}: {str(error) or type(error).__name__}") from error


async def _collect(
    events: AsyncIterator[dict[str, Any]], show: Callable[[str], None], begin: float
) -> ChatResponse:
    first = last = None
    texts: list[str] = []
    usage: dict[str, int] = {}
    async for event in events:
        if "error" in event:
            raise ChatError(str(event["error"].get("message", event["error"])))
        usage = event.get("usage") or usage
        text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        if text:
            last = time.perf_counter()
            first = first or last
            texts.append(text)
            show(text)
    if first is None or last is None or not usage:
        raise ChatError("the response has no text")
    tokens = usage["completion_tokens"]
    return ChatResponse(
        text="".join(texts),
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=tokens,
        ttft_ms=(first - begin) * 1e3,
        tpot_ms=(last - first) * 1e3 / (tokens - 1) if tokens > 1 else 0.0,
    )


async def _read_events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield server-sent events up to `[DONE]`. Raises ChatError if the stream ends before it."""
    async for line in response.content:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    raise ChatError("the stream ended before [DONE]")


def _describe_error(status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    return f"status {status}: {message}"
