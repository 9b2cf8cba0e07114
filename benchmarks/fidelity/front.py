"""What a request takes of an engine beyond its passes, where front and engine share a core.

On CPU a vLLM instance has its cores to itself, but its API server and scheduler run on them as
well: reading a request, queueing and ending it take time from passes. An engine that always has the
next prompt waiting shows it: it needs longer for each than a pass. What tokens cost is in the
profile: gaps between tokens hold it.
"""

import asyncio
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

from cleave.perf.timing import Timing
from cleave.profiling.client import Client
from cleave.profiling.engine import read_counters
from cleave.profiling.shots import draw

TOKENS = 256
TURNS = 15
ALONE, QUEUED = 4, 16
"""Requests of a turn: one by one, and two at a time."""


def measure_front(engine_url: str, model: str, file: Path) -> None:
    """Keep the milliseconds of one request beyond its pass in `file`, unless it is there."""
    if not file.exists():
        file.write_text(json.dumps(asyncio.run(_measure(Client(engine_url, model)))))


def read_front(file: Path) -> float:
    """What `measure_front` kept."""
    return float(json.loads(file.read_text()))


def share_core(timing: Timing, share: float) -> Timing:
    """Passes on a core of which `share`, 0 to 1, goes to the front."""
    factor = 1 / (1 - share)
    return replace(
        timing,
        prompt_ms=tuple(ms * factor for ms in timing.prompt_ms),
        prompt_square_ms=timing.prompt_square_ms * factor,
        decode_ms=tuple(ms * factor for ms in timing.decode_ms),
        decode_context_ms=tuple(ms * factor for ms in timing.decode_context_ms),
    )


async def _measure(client: Client) -> float:
    """Median over turns, so that pass and queue are of the same seconds."""
    rng = random.Random(1)
    taken = []
    for _ in range(TURNS):
        before = await read_counters(client)
        await _ask(client, rng, ALONE)
        after = await read_counters(client, before.prefills + ALONE)
        pass_s = (after.prefill_s - before.prefill_s) / ALONE
        begin = time.perf_counter()
        await asyncio.gather(*(_ask(client, rng, QUEUED // 2) for _ in range(2)))
        taken.append((time.perf_counter() - begin) / QUEUED - pass_s)
    return max(0.0, median(taken) * 1e3)


async def _ask(client: Client, rng: random.Random, requests: int) -> None:
    for _ in range(requests):
        await client.complete(draw(rng, TOKENS), 1)
