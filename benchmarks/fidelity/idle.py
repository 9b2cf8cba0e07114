"""What single requests on an idle fleet take, and what that says of the way to its engines."""

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from cleave.profiling.client import Client
from cleave.profiling.shots import draw
from cleave.simulator.fleet import Fleet, Transfer
from cleave.simulator.run import simulate
from cleave.simulator.trace import Trace

TOKENS = (16, 128, 512, 1024, 2000)
OUTPUT_TOKENS = 2
REPEATS = 9
_APART_MS = 1e6

Idle = Mapping[int, float]
"""Prompt tokens -> median time to first token, in milliseconds of the trace."""


def measure_idle(url: str, model: str, time_scale: float, file: Path) -> None:
    """Ask the fleet at `url` one by one and keep the times in `file`, unless it is there."""
    if not file.exists():
        found = asyncio.run(_ask(Client(url, model)))
        file.write_text(json.dumps({n: ms / time_scale for n, ms in found.items()}))


def read_idle(file: Path) -> Idle:
    """What `measure_idle` kept."""
    return {int(tokens): ms for tokens, ms in json.loads(file.read_text()).items()}


def calibrate_dispatch(fleet: Fleet, idle: Idle) -> float:
    """Milliseconds of one way from client to instance: what the fleet takes beyond its twin."""
    ways = 2 if fleet.decode else 1
    return max(0.0, median(_excess_ms(replace(fleet, dispatch_ms=0.0), idle).values()) / ways)


def calibrate_transfer(fleet: Fleet, idle: Idle) -> Transfer:
    """A straight line through what the fleet takes beyond a twin that transfers in no time."""
    excess = _excess_ms(replace(fleet, transfer=Transfer()), idle)
    token_ms, latency_ms = np.polyfit(list(excess), list(excess.values()), 1)
    return Transfer(latency_ms=max(0.0, float(latency_ms)), token_ms=max(0.0, float(token_ms)))


async def _ask(client: Client) -> dict[int, float]:
    rng = random.Random(0)
    taken: dict[int, list[float]] = {tokens: [] for tokens in TOKENS}
    for turn in range(REPEATS + 1):
        for tokens, times in taken.items():
            answer = await client.complete(draw(rng, tokens), OUTPUT_TOKENS)
            # The first turn warms up.
            times += [answer.ttft_ms] if turn else []
    return {tokens: median(times) for tokens, times in taken.items()}


def _excess_ms(fleet: Fleet, idle: Idle) -> dict[int, float]:
    tokens = np.array(sorted(idle), dtype=np.int64)
    trace = Trace(np.arange(len(tokens)) * _APART_MS, tokens, np.full_like(tokens, OUTPUT_TOKENS))
    ttft_ms = simulate(fleet, trace).ttft_ms
    return {int(n): idle[int(n)] - float(ms) for n, ms in zip(tokens, ttft_ms, strict=True)}
