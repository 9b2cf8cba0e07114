"""Facts and counters of an engine: model, version, KV cache, totals of its iterations.

Read from `/v1/models`, `/version` and vLLM's metrics, which the emulated engine has as well.
"""

import asyncio
import re
from dataclasses import dataclass

from cleave.profiling.client import OpenAIClient
from cleave.profiling.errors import ProfilingError

_LABEL = re.compile(r'(\w+)="([^"]*)"')
_COUNTER_TIMEOUT_S = 10.0
_COUNTER_PERIOD_S = 0.005


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One running engine."""

    model: str
    """Name under which the model is served."""
    source: str
    """Origin of the weights: a model id or a folder."""
    engine: str
    """vllm or emulated."""
    version: str
    max_model_len: int
    kv_block_size: int
    kv_blocks_total: int

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens of KV in all blocks."""
        return self.kv_block_size * self.kv_blocks_total


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Totals since the engine started."""

    prefills: int
    prefill_s: float
    """Sum of the times from scheduling to the first token, by the engine's own clock."""
    queue_s: float
    """Sum of the times before that: waiting to be scheduled, or for KV that is pulled."""
    iterations: int


async def inspect_engine(client: OpenAIClient, model: str | None) -> EngineInfo:
    """The engine at `client`; `model` is required if it serves several. Raises ProfilingError."""
    cards = (await client.get_json("/v1/models")).get("data", [])
    names = [card["id"] for card in cards]
    if model is None and len(names) == 1:
        model = names[0]
    if model is None or model not in names:
        remedy = "name one with --model" if model is None else f"there is no {model!r}"
        raise ProfilingError(f"{client.url} serves {', '.join(names) or 'no model'}: {remedy}")
    card = cards[names.index(model)]
    if card.get("owned_by") == "cleave":
        remedy = "give the URL of one of its engines, as cleave status shows them"
        raise ProfilingError(f"{client.url} is a gateway of Cleave: {remedy}")
    version = await client.get_json("/version")
    cache = _find_labels(await client.get("/metrics"), "vllm:cache_config_info")
    return EngineInfo(
        model=model,
        source=card.get("root") or model,
        engine=version.get("engine", "vllm"),
        version=version["version"],
        max_model_len=int(card["max_model_len"]),
        kv_block_size=_read_integer(cache, "block_size"),
        kv_blocks_total=_read_integer(cache, "num_gpu_blocks"),
    )


async def count_requests(client: OpenAIClient) -> int:
    """Number of requests that run or wait on the engine. Raises ProfilingError."""
    page, names = await client.get("/metrics"), ("running", "waiting")
    return round(sum(_sum_series(page, f"vllm:num_requests_{name}") for name in names))


async def read_counters(client: OpenAIClient, prefills: int = 0) -> EngineCounters:
    """The counters as soon as they include at least `prefills` requests.

    Engines update counters after they respond, so the last request may be missing for a moment.
    Raises ProfilingError when it is missing after a timeout.
    """
    deadline = asyncio.get_running_loop().time() + _COUNTER_TIMEOUT_S
    while True:
        page = await client.get("/metrics")
        counters = EngineCounters(
            prefills=round(_sum_series(page, "vllm:request_prefill_time_seconds_count")),
            prefill_s=_sum_series(page, "vllm:request_prefill_time_seconds_sum"),
            queue_s=_sum_series(page, "vllm:request_queue_time_seconds_sum"),
            iterations=round(_sum_series(page, "vllm:iteration_tokens_total_count")),
        )
        if counters.prefills >= prefills:
            return counters
        if asyncio.get_running_loop().time() > deadline:
            raise ProfilingError(f"{client.url}/metrics does not count requests that were answered")
        await asyncio.sleep(_COUNTER_PERIOD_S)


def _find_labels(page: bytes, name: str) -> dict[str, str]:
    for line in page.decode().splitlines():
        if line.startswith(f"{name}{{"):
            return dict(_LABEL.findall(line))
    return {}


def _sum_series(page: bytes, name: str) -> float:
    """The sum of all samples of a metric. Raises ProfilingError when there is none."""
    lines = [line for line in page.decode().splitlines() if line.startswith(f"{name}{{")]
    if not lines:
        raise ProfilingError(f"the engine has no metric {name}; is it vLLM with its statistics on?")
    return sum(float(line.rsplit(maxsplit=1)[1]) for line in lines)


def _read_integer(labels: dict[str, str], name: str) -> int:
    value = labels.get(name, "")
    if not value.isdigit():
        raise ProfilingError(
            f"the engine's metric vllm:cache_config_info has no {name}; is it vLLM 0.9 or later?"
        )
    return int(value)
