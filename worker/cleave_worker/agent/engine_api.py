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
_PULLED_TOKENS = re.compile(
    rb'^vllm:prompt_tokens_by_source_total\{.*\bsource="external_kv_transfer".*\} (\S+)$',
    re.MULTILINE,
)
_LOST = re.compile(
    rb"^(?:vllm:nixl_num_failed_transfers_total|cleave_kv_lost_total)\b.* (\S+)$", re.MULTILINE
)
_WAYS = re.compile(rb'^cleave_kv_pulled_bytes_total\{.*\bway="([^"]+)".*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Pulled:
    """What an engine has counted of KV from other engines since it started, all ranks together."""

    num_bytes: float
    seconds: float
    num_tokens: float
    """Of prompts that came with a hand-off, whether or not its KV arrived."""
    num_lost: float
    """Failures. NixlConnector counts failed handshakes and notifications beside transfers; with
    either connector each rank counts its own."""
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


async def pulled(url: str, seconds: float) -> Pulled | None:
    """What the engine has pulled so far; None where it counts no such bytes. Raises HttpError."""
    answer = await http.request("GET", f"{url}/metrics", seconds=seconds)
    if answer.status != 200:
        raise http.HttpError(f"{url}/metrics answers {answer.status}")
    page = answer.body
    if not _PULLED_BYTES.search(page):
        return None
    return Pulled(
        num_bytes=_sum(_PULLED_BYTES, page),
        seconds=_sum(_PULL_SECONDS, page),
        num_tokens=_sum(_PULLED_TOKENS, page),
        num_lost=_sum(_LOST, page),
        way=_way(page),
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
