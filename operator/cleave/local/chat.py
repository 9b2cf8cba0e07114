"""One streamed chat request to the gateway, measured as a client sees it. Used by the demo."""

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from cleave.local.errors import ChatError

_CONNECT_S = 5.0
_SILENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer and how long it took."""

    text: str
    prompt_tokens: int
    output_tokens: int
    ttft_ms: float
    tpot_ms: float
    """(end - first token) / (output tokens - 1); 0 for a single token."""


async def ask(url: str, body: Mapping[str, Any], show: Callable[[str], None]) -> Answer:
    """Send `body` to the chat endpoint at `url`, show text as it comes. Raises ChatError."""
    timeout = httpx.Timeout(_SILENCE_S, connect=_CONNECT_S)
    request = {**body, "stream": True, "stream_options": {"include_usage": True}}
    begin = time.perf_counter()
    try:
        async with (
            httpx.AsyncClient(timeout=timeout, trust_env=False) as client,
            client.stream("POST", f"{url}/v1/chat/completions", json=request) as response,
        ):
            if response.status_code != httpx.codes.OK:
                raise ChatError(_fault(response.status_code, await response.aread()))
            return await _collect(_events(response), show, begin)
    except httpx.HTTPError as error:
        raise ChatError(f"{url}: {error or type(error).__name__}") from error


async def _collect(
    events: AsyncIterator[dict[str, Any]], show: Callable[[str], None], begin: float
) -> Answer:
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
        raise ChatError("the answer has no text")
    tokens = usage["completion_tokens"]
    return Answer(
        text="".join(texts),
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=tokens,
        ttft_ms=(first - begin) * 1e3,
        tpot_ms=(last - first) * 1e3 / (tokens - 1) if tokens > 1 else 0.0,
    )


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Server-sent events up to `[DONE]`. Raises ChatError when the stream ends before it."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            if line == "data: [DONE]":
                return
            yield json.loads(line.removeprefix("data: "))
    raise ChatError("the stream ended before its end mark")


def _fault(status: int, body: bytes) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:200].decode(errors="replace")
    return f"status {status}: {message}"
