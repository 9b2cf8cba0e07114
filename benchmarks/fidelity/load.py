"""Open-loop load: every request is sent at its trace's time, independent of earlier ones."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from cleave.profiling.client import OpenAIClient
from cleave.profiling.errors import ProfilingError
from cleave.profiling.measurements import draw_prompt
from cleave.simulator.trace import Trace

Times = NDArray[np.float64]
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
"""vLLM's names of computed prompt tokens, and of those in its own cache and another one's."""
START_S = 0.5
"""Before the first arrival: the generator is ready by then."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What clients saw, one entry per request, in milliseconds of the trace; nan: it failed."""

    first_token_ms: Times
    """Since the request was due."""
    end_ms: Times
    lag_ms: Times
    """By which the generator itself sent late."""
    gaps_ms: Times
    """Between the tokens of all requests."""
    faults: tuple[str, ...]
    busy_share: float
    """Of this machine's cores, by all processes, while the load ran."""
    prompt_tokens: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Computed, found in the instance's prefix cache, pulled from another one's: as engines that
    compute prompts counted."""

    def tpot_ms(self, trace: Trace) -> Times:
        """(end - first token) / (output tokens - 1); 0 for a single token."""
        return (self.end_ms - self.first_token_ms) / np.maximum(trace.output_tokens - 1, 1)


def as_sent(trace: Trace, seen: Seen) -> tuple[Trace, Seen]:
    """Both with the arrivals as the fleet had them: when requests left, not when they were due."""
    lag_ms = np.nan_to_num(seen.lag_ms)
    order = np.argsort(trace.arrival_ms + lag_ms, kind="stable")
    arrival_ms = (trace.arrival_ms + lag_ms)[order]
    blocks = trace.blocks and trace.blocks.select(order, np.zeros(len(order), np.int64))
    sent = Trace(arrival_ms, trace.prompt_tokens[order], trace.output_tokens[order], blocks=blocks)
    first_ms, end_ms = (
        times[order] - lag_ms[order] for times in (seen.first_token_ms, seen.end_ms)
    )
    return sent, replace(seen, first_token_ms=first_ms, end_ms=end_ms, lag_ms=seen.lag_ms[order])


async def offer(
    client: OpenAIClient,
    trace: Trace,
    time_scale: float,
    seed: int,
    engines: Sequence[OpenAIClient] = (),
) -> Seen:
    """Send `trace`, its clock stretched by `time_scale`; no other rate has these prompts.
    `engines`: those that compute prompts, whose tokens are counted."""
    loop = asyncio.get_running_loop()
    # Another load of the same seed must not ask the same prompts: caches would answer.
    name = f"{seed} {trace.rate}"
    rng = random.Random(name)
    start_s = loop.time() + START_S
    before, tokens_before = read_cpu_ticks(), await count_prompt_tokens(engines)
    times = np.full((3, len(trace)), np.nan)
    faults: list[str] = []
    gaps_s: list[float] = []

    async def send(index: int, due_s: float) -> None:
        prompt = build_prompt(trace, index, name, rng)
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        try:
            answer = await client.complete(prompt, int(trace.output_tokens[index]))
        except ProfilingError as error:
            faults.append(f"request {index}: {error}")
            return
        times[:, index] = answer.token_s[0], answer.token_s[-1], answer.sent_s
        times[:, index] -= due_s
        gaps_s.extend(np.diff(answer.token_s).tolist())

    async with asyncio.TaskGroup() as group:
        for index, arrival_ms in enumerate(trace.arrival_ms):
            due_s = start_s + arrival_ms * time_scale / 1e3
            # A little early, so that making the prompt and connecting do not count.
            await asyncio.sleep(max(0.0, due_s - loop.time() - START_S / 2))
            group.create_task(send(index, due_s))
    first_ms, end_ms, lag_ms = times * 1e3 / time_scale
    gaps_ms = np.array(gaps_s) * 1e3 / time_scale
    busy, total = (after - then for after, then in zip(read_cpu_ticks(), before, strict=True))
    tokens = await count_prompt_tokens(engines)
    computed, cached, pulled = (b - a for a, b in zip(tokens_before, tokens, strict=True))
    counted = computed, cached, pulled
    share = busy / max(total, 1)
    return Seen(first_ms, end_ms, lag_ms, gaps_ms, tuple(faults), share, counted)


async def count_prompt_tokens(engines: Sequence[OpenAIClient]) -> tuple[float, ...]:
    """Of all engines since their start: computed, cached, pulled."""
    counts = dict.fromkeys(SOURCES, 0.0)
    for engine in engines:
        page = (await engine.get("/metrics")).decode()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name == "vllm:prompt_tokens_by_source_total":
                    counts[sample.labels["source"]] += sample.value
    return tuple(counts.values())


def build_prompt(trace: Trace, index: int, name: str, rng: random.Random) -> list[int]:
    """The prompt of a request: new, or of the trace's blocks, those of equal numbers equal."""
    tokens, blocks = int(trace.prompt_tokens[index]), trace.blocks
    if blocks is None:
        return draw_prompt(rng, tokens)
    numbers = blocks.numbers[blocks.starts[index] : blocks.starts[index + 1]]
    parts = (draw_prompt(random.Random(f"{name} {n}"), blocks.block_tokens) for n in numbers)
    return list(chain.from_iterable(parts))[:tokens]


def read_cpu_ticks() -> tuple[int, int]:
    """(busy, all) of all cores together since the machine started."""
    first = Path("/proc/stat").read_text().partition("\n")[0]
    ticks = [int(word) for word in first.split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)
