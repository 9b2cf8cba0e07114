"""What single requests on an idle fleet take beyond its passes: the way to engines, pulls of KV.

What is hard: a machine that is a little slower now than it was for the profile must not show as a
longer way. So nothing here is compared with predictions: engines count, by their own clocks, the
time in passes and the time before them, and the way is what is left of what the client saw.
"""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
from deployments import Stage

from cleave.profiling.client import OpenAIClient
from cleave.profiling.engine_info import EngineCounters, read_counters
from cleave.profiling.measurements import draw_prompt
from cleave.simulator.fleet import SimulatedTransfer

TOKENS = (16, 128, 512, 1024, 2000)
OUTPUT_TOKENS = 2
REPEATS = 15
COUNT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Alone:
    """Requests of one length, in milliseconds of the trace; medians."""

    tokens: int
    front_ms: float
    """HTTP, gateway and the engines' fronts, up to the first token."""
    pull_ms: float
    """From reaching the decode engine until its KV is there; about 0 on a mixed one."""


def measure_idle(stage: Stage, model: str, time_scale: float, file: Path) -> None:
    """Ask the fleet one by one and keep the times in `file`, unless it is there."""
    if not file.exists():
        found = asyncio.run(_ask(stage, model, time_scale))
        file.write_text(json.dumps([asdict(each) for each in found]))


def read_idle(file: Path) -> list[Alone]:
    """What `measure_idle` kept."""
    return [Alone(**each) for each in json.loads(file.read_text())]


def find_dispatch(idle: Sequence[Alone], ways: int) -> float:
    """Milliseconds of one way from client to instance, of `ways` that a request takes."""
    return max(0.0, median(each.front_ms for each in idle) / ways)


def fit_transfer(idle: Sequence[Alone]) -> SimulatedTransfer:
    """A straight line through the pulls; they do not wait for each other: most of it is latency."""
    tokens, pulls = [each.tokens for each in idle], [each.pull_ms for each in idle]
    token_ms, latency_ms = np.polyfit(tokens, pulls, 1)
    return SimulatedTransfer(
        is_shared=False, latency_ms=max(0.0, float(latency_ms)), token_ms=max(0.0, float(token_ms))
    )


async def _ask(stage: Stage, model: str, time_scale: float) -> list[Alone]:
    rng = random.Random(0)
    client = OpenAIClient(stage.url, model)
    engines = [stage.connect(url) for urls in stage.engines.values() for url in urls]
    samples: dict[int, list[tuple[float, float]]] = {tokens: [] for tokens in TOKENS}
    for turn in range(REPEATS + 1):
        for tokens, times in samples.items():
            before = await _count(engines, 0)
            answer = await client.complete(draw_prompt(rng, tokens), OUTPUT_TOKENS)
            # Each role that a request passes counts it once.
            after = await _count(engines, before.prefills + len(stage.engines))
            pull_ms = (after.queue_s - before.queue_s) * 1e3
            pass_ms = (after.prefill_s - before.prefill_s) * 1e3
            # The first turn warms up.
            times += [(answer.ttft_ms - pass_ms - pull_ms, pull_ms)] if turn else []
    return [
        Alone(
            tokens,
            median(front for front, _ in times) / time_scale,
            median(pull for _, pull in times) / time_scale,
        )
        for tokens, times in samples.items()
    ]


async def _count(engines: Sequence[OpenAIClient], prefills: int) -> EngineCounters:
    """All engines together, when `prefills` requests are counted."""
    async with asyncio.timeout(COUNT_TIMEOUT_S):
        while True:
            counted = await asyncio.gather(*map(read_counters, engines))
            total = EngineCounters(
                prefills=sum(each.prefills for each in counted),
                prefill_s=sum(each.prefill_s for each in counted),
                queue_s=sum(each.queue_s for each in counted),
                iterations=sum(each.iterations for each in counted),
            )
            if total.prefills >= prefills:
                return total
            await asyncio.sleep(0.005)
