"""What an engine's HTTP front takes of the core that it shares with the engine.

On CPU a vLLM instance has its cores to itself, but its API server runs on them as well: the time it
needs for a request is taken from passes. CPU time is counted by the kernel, so a busy machine does
not change it. What tokens cost the front is in the profile: gaps between tokens hold it.
"""

import asyncio
import json
import random
from dataclasses import replace
from pathlib import Path

import psutil
from stage import Stage

from cleave.perf.timing import Timing
from cleave.profiling.client import Client
from cleave.profiling.shots import draw

REQUESTS = 50
TOKENS = 256
API_SERVER = "vllm.entrypoints.openai.api_server"


def measure_front(stage: Stage, model: str, file: Path) -> None:
    """Keep the front's CPU milliseconds of one request, per instance, unless `file` is there."""
    if file.exists():
        return
    fronts = [_find_front(pid) for pid in stage.agents]
    before = sum(map(_cpu_s, fronts))
    asyncio.run(_ask(Client(stage.url, model)))
    # Every instance of a small fleet of one per role sees every request.
    spent_s = sum(map(_cpu_s, fronts)) - before
    file.write_text(json.dumps(spent_s * 1e3 / REQUESTS / len(fronts)))


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


async def _ask(client: Client) -> None:
    rng = random.Random(1)
    for _ in range(REQUESTS):
        await client.complete(draw(rng, TOKENS), 1)


def _find_front(agent: int) -> psutil.Process:
    """The API server below an agent: the first of the processes that run its module."""
    return next(
        process
        for process in psutil.Process(agent).children(recursive=True)
        if API_SERVER in (line := " ".join(process.cmdline())) and "warden" not in line
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
