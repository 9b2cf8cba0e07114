"""What the agent asks engines over HTTP, beside completions: how they are, what they have done.

Used by the supervisor and the KV test. vLLM and the emulated engine answer alike.
"""

import json
import re
from dataclasses import dataclass

from cleave_worker.agent import http
from cleave_worker.agent.instance import EngineFacts

_BLOCK_SIZE = re.compile(rb'^vllm:cache_config_info\{.*?\bblock_size="(\d+)"', re.MULTILINE)
_PULLED_BYTES = re.compile(
    rb"^(?:vllm:nixl_bytes_transferred_sum|cleave_kv_pulled_bytes_total)\b.* (\S+)$", re.MULTILINE
)
_PULL_SECONDS = re.compile(
    rb"^(?:vllm:nixl_xfer_time_seconds_sum|cleave_kv_pull_seconds_sum)\b.* (\S+)$", re.MULTILINE
)
_WAYS = re.compile(rb'^cleave_kv_pulled_bytes_total\{.*\bway="([^"]+)".*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Pulled:
    """KV that an engine has pulled from others since it started."""

    num_bytes: float
    seconds: float
    way: str = ""
    """What carried most of it; empty: the engine does not tell."""


async def fault(url: str, seconds: float) -> str:
    """Why the engine is not well; empty when it is."""
    try:
        answer = await http.request("GET", f"{url}/health", seconds=seconds)
    except http.HttpError as error:
        return f"/health: {error}"
    return "" if answer.status == 200 else f"/health answers {answer.status}"


async def facts(url: str, engine: str, block_size: int, seconds: float) -> EngineFacts:
    """What the engine says about itself; `block_size` where it is silent. Raises HttpError."""
    models = await _json(f"{url}/v1/models", seconds)
    version = (await _json(f"{url}/version", seconds)).get("version", "")
    cards = models.get("data")
    served = cards if isinstance(cards, list) else []
    first = served[0] if served else {}
    metrics = await http.request("GET", f"{url}/metrics", seconds=seconds)
    told = _BLOCK_SIZE.search(metrics.body)
    return EngineFacts(
        engine=f"{engine} {version}".strip() if engine == "vllm" else engine,
        max_model_len=int(first.get("max_model_len") or 0),
        kv_block_size=int(told.group(1)) if told else block_size,
        # Only what changes another model has a parent.
        adapters=tuple(str(card["id"]) for card in served if card.get("parent")),
    )


async def pulled(url: str, seconds: float) -> Pulled:
    """What the engine has pulled so far; zeros when it does not tell. Raises HttpError."""
    metrics = await http.request("GET", f"{url}/metrics", seconds=seconds)
    return Pulled(
        _sum(_PULLED_BYTES, metrics.body), _sum(_PULL_SECONDS, metrics.body), _way(metrics.body)
    )


def _way(metrics: bytes) -> str:
    found = [(float(value), way.decode()) for way, value in _WAYS.findall(metrics)]
    num_bytes, way = max(found, default=(0.0, ""))
    return way if num_bytes else ""


def _sum(pattern: re.Pattern[bytes], metrics: bytes) -> float:
    return sum(float(value) for value in pattern.findall(metrics))


async def _json(url: str, seconds: float) -> dict[str, object]:
    answer = await http.request("GET", url, seconds=seconds)
    try:
        content = json.loads(answer.body)
    except ValueError:
        content = None
    if answer.status != 200 or not isinstance(content, dict):
        raise http.HttpError(f"{url} answers {answer.status}, not a JSON object")
    return content
