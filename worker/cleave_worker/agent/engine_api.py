"""Requests of the agent to engines over HTTP: health, models, adapters, first use, pull counters.

Used by the supervisor and the KV test. vLLM and the emulated engine respond alike. Without TLS, as
engines speak plain HTTP inside the cluster. Bodies are held in memory.
"""

import asyncio
import json
import re
from dataclasses import dataclass

from cleave.rpc.http_client import HttpError, open_response
from cleave.rpc.pull_counters import PullCounters, parse_pull_counters
from cleave_worker.agent.instance import ServedEngineInfo

_BODY_LIMIT = 8 << 20
_MAX_FAULT = 200
_MAX_SENTENCE = 500
_OK, _NOT_FOUND = 200, 404
_SAMPLING = {"temperature": 1, "top_p": 0.9, "top_k": 5, "logprobs": 1}

_EFFORTS = ("low", "medium", "high", "xhigh", "max")

_BLOCK_SIZE = re.compile(rb'^vllm:cache_config_info\{.*?\bblock_size="(\d+)"', re.MULTILINE)


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


async def check_health(url: str, seconds: float) -> str:
    """Return why the engine is unhealthy; empty when it is healthy."""
    try:
        response = await request("GET", f"{url}/health", seconds=seconds)
    except HttpError as error:
        return f"/health: {error}"
    return "" if response.status == 200 else f"/health answers {response.status}"


async def is_listening(host: str, port: int, seconds: float) -> bool:
    """Return whether a connection to this port is accepted within `seconds`; never for port 0."""
    if not port:
        return False
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
    return True


async def fetch_info(
    url: str,
    engine: str,
    block_size: int,
    seconds: float,
    headers: dict[str, str] | None = None,
    *,
    model_report: str = "",
) -> ServedEngineInfo:
    """Return what the engine serves; `block_size` is the default, `model_report` what it has
    written about its model. Raises HttpError."""
    models = await _fetch_json(f"{url}/v1/models", seconds, headers)
    version = (await _fetch_json(f"{url}/version", seconds, headers)).get("version", "")
    cards = models.get("data")
    served = cards if isinstance(cards, list) else []
    first = served[0] if served else {}
    metrics = await request("GET", f"{url}/metrics", seconds=seconds)
    match = _BLOCK_SIZE.search(metrics.body)
    return ServedEngineInfo(
        engine=f"{engine} {version}".strip() if engine == "vllm" else engine,
        max_model_len=int(first.get("max_model_len") or 0),
        kv_block_size=int(match.group(1)) if match else block_size,
        adapters=_select_adapters(served),
        model_report=model_report,
        always_thinks=engine == "vllm" and await _is_always_thinking(url, seconds, headers),
    )


async def _is_always_thinking(url: str, seconds: float, headers: dict[str, str] | None) -> bool:
    """Whether a chat without thinking has the prompt of one with some effort, or none at all: then
    a parser of reasoning would take thoughts for the answer. As vLLM 0.32 finds it out for its own
    Messages API (`entrypoints/anthropic/serving.py`). False where it does not answer in time."""
    prompts = []
    for effort in ("none", *_EFFORTS):
        options = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        chat = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": options}
        try:
            answer = await request(
                "POST", f"{url}/tokenize", chat, seconds=seconds, headers=headers
            )
        except HttpError:
            return False
        prompts.append(answer.body if answer.status == _OK else b"")
    return not prompts[0] or prompts[0] in prompts[1:]


async def warm_up(
    url: str, model: str, seconds: float, headers: dict[str, str] | None = None
) -> str:
    """Let the engine do what it does at the first request only; return why it has not.

    vLLM compiles the ranks of log-probabilities for the first request that asks for them (the
    gateway's canaries do), and every other request waits: 16 to 21 s on CPU. Raises HttpError.
    """
    payload = {"model": model, "prompt": "a", "max_tokens": 2} | _SAMPLING
    answer = await request(
        "POST", f"{url}/v1/completions", payload, seconds=seconds, headers=headers
    )
    return "" if answer.status == 200 else f"{answer.status}: {answer.body[:_MAX_FAULT]!r}"


async def load_adapter(
    url: str, name: str, source: str, seconds: float, headers: dict[str, str] | None = None
) -> str:
    """Load a LoRA adapter into the running engine; return why it was not, empty if it was.
    One that the engine has already counts as loaded. Raises HttpError."""
    payload = {"lora_name": name, "lora_path": source}
    answer = await request(
        "POST", f"{url}/v1/load_lora_adapter", payload, seconds=seconds, headers=headers
    )
    if answer.status == _OK or name in await _list_adapters(url, seconds, headers):
        return ""
    return _read_fault(answer)


async def remove_adapter(
    url: str, name: str, seconds: float, headers: dict[str, str] | None = None
) -> None:
    """Unload a LoRA adapter; the engine finishes its requests. Raises HttpError."""
    payload = {"lora_name": name}
    answer = await request(
        "POST", f"{url}/v1/unload_lora_adapter", payload, seconds=seconds, headers=headers
    )
    if answer.status not in (_OK, _NOT_FOUND):
        raise HttpError(_read_fault(answer))


async def _list_adapters(
    url: str, seconds: float, headers: dict[str, str] | None
) -> tuple[str, ...]:
    cards = (await _fetch_json(f"{url}/v1/models", seconds, headers)).get("data")
    return _select_adapters(cards if isinstance(cards, list) else [])


def _select_adapters(cards: list[dict[str, object]]) -> tuple[str, ...]:
    """Only adapters have a parent."""
    return tuple(str(card["id"]) for card in cards if card.get("parent"))


def _read_fault(answer: EngineResponse) -> str:
    """The engine's sentence, or the beginning of its body."""
    try:
        content = json.loads(answer.body)
        # Versions of vLLM differ in the level.
        sentence = content.get("error", content)["message"]
    except (ValueError, LookupError, TypeError, AttributeError):
        sentence = repr(answer.body[:_MAX_FAULT])
    return f"the engine answers {answer.status}: {sentence}"[:_MAX_SENTENCE]


async def fetch_pull_counters(url: str, seconds: float) -> PullCounters | None:
    """Return the pull counters; None when the engine has none. Raises HttpError."""
    response = await request("GET", f"{url}/metrics", seconds=seconds)
    if response.status != 200:
        raise HttpError(f"{url}/metrics answers {response.status}")
    return parse_pull_counters(response.body)


async def _fetch_json(
    url: str, seconds: float, headers: dict[str, str] | None
) -> dict[str, object]:
    response = await request("GET", url, seconds=seconds, headers=headers)
    try:
        content = json.loads(response.body)
    except ValueError:
        content = None
    if response.status != 200 or not isinstance(content, dict):
        raise HttpError(f"{url} answers {response.status}, not a JSON object")
    return content
