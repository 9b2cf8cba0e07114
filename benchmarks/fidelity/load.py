"""Open-loop load: every request is sent at its trace's time, independent of earlier ones."""

import asyncio
import random
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cleave.profiling.client import OpenAIClient
from cleave.profiling.errors import ProfilingError
from cleave.profiling.measurements import draw_prompt
from cleave.simulator.trace import Trace

Times = NDArray[np.float64]
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
    faults: tuple[str, ...]
    busy_share: float
    """Of this machine's cores, by all processes, while the load ran."""

    def tpot_ms(self, trace: Trace) -> Times:
        """(end - first token) / (output tokens - 1); 0 for a single token."""
        return (self.end_ms - self.first_token_ms) / np.maximum(trace.output_tokens - 1, 1)


def as_sent(trace: Trace, seen: Seen) -> tuple[Trace, Seen]:
    """Both with the arrivals as the fleet had them: when requests left, not when they were due."""
    lag_ms = np.nan_to_num(seen.lag_ms)
    order = np.argsort(trace.arrival_ms + lag_ms, kind="stable")
    arrival_ms = (trace.arrival_ms + lag_ms)[order]
    sent = Trace(arrival_ms, trace.prompt_tokens[order], trace.output_tokens[order])
    first_ms, end_ms = (
        times[order] - lag_ms[order] for times in (seen.first_token_ms, seen.end_ms)
    )
    return sent, replace(seen, first_token_ms=first_ms, end_ms=end_ms, lag_ms=seen.lag_ms[order])


async def offer(client: OpenAIClient, trace: Trace, time_scale: float, seed: int) -> Seen:
    """Send `trace`, its clock stretched by `time_scale`; no other rate has these prompts."""
    loop = asyncio.get_running_loop()
    # Another load of the same seed must not ask the same prompts: caches would answer.
    rng = random.Random(f"{seed} {trace.rate}")
    start_s = loop.time() + START_S
    before = read_cpu_ticks()
    times = np.full((3, len(trace)), np.nan)
    faults: list[str] = []

    async def send(index: int, due_s: float) -> None:
        prompt = draw_prompt(rng, int(trace.prompt_tokens[index]))
        await asyncio.sleep(max(0.0, due_s - loop.time()))
        try:
            answer = await client.complete(prompt, int(trace.output_tokens[index]))
        except ProfilingError as error:
            faults.append(f"request {index}: {error}")
            return
        times[:, index] = answer.token_s[0], answer.token_s[-1], answer.sent_s
        times[:, index] -= due_s

    async with asyncio.TaskGroup() as group:
        for index, arrival_ms in enumerate(trace.arrival_ms):
            due_s = start_s + arrival_ms * time_scale / 1e3
            # A little early, so that making the prompt and connecting do not count.
            await asyncio.sleep(max(0.0, due_s - loop.time() - START_S / 2))
            group.create_task(send(index, due_s))
    first_ms, end_ms, lag_ms = times * 1e3 / time_scale
    busy, total = (after - then for after, then in zip(read_cpu_ticks(), before, strict=True))
    return Seen(first_ms, end_ms, lag_ms, tuple(faults), busy / max(total, 1))


def read_cpu_ticks() -> tuple[int, int]:
    """(busy, all) of all cores together since the machine started."""
    first = Path("/proc/stat").read_text().partition("\n")[0]
    ticks = [int(word) for word in first.split()[1:9]]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks)
