"""Clients of the day, in a process of their own, that nothing else holds up.

`python clients.py TRACE SEEN TIME_SCALE URL...`: asks the gateways in turn as TRACE (arrays in npz)
says, prints a line when it begins and writes what clients saw to SEEN. A while after the last
request the day is over, and who still waits goes home: with infinite times, for nothing failed.
"""

import asyncio
import itertools
import math
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "fidelity"))
import load
import scoring
from deployment import NAME

from cleave.profiling.client import OpenAIClient, TimedCompletion
from cleave.simulator.trace import Trace

PATIENCE_S = 20.0
"""From the last request to the end of the day."""


class InTurns:
    """Spreads requests over gateways, as a Service does."""

    def __init__(self, urls: list[str], span_s: float) -> None:
        self._clients = itertools.cycle([OpenAIClient(url, NAME, 2 * span_s) for url in urls])
        self._end_s = asyncio.get_running_loop().time() + span_s

    async def complete(self, prompt: list[int], output_tokens: int) -> TimedCompletion:
        """One answer of the next gateway."""
        sent_s = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(self._end_s):
                return await next(self._clients).complete(prompt, output_tokens)
        except TimeoutError:
            return TimedCompletion(sent_s, (math.inf,), 0)


async def ask(trace: Trace, time_scale: float, urls: list[str]) -> load.Seen:
    """Everything of `trace`, until the day is over."""
    span_s = float(trace.arrival_ms[-1]) / 1e3 * time_scale + PATIENCE_S
    return await load.offer(InTurns(urls, span_s), trace, time_scale, seed=1)


def main(trace_file: Path, seen_file: Path, time_scale: float, urls: list[str]) -> None:
    """Ask, then write."""
    arrays = np.load(trace_file)
    trace = Trace(arrays["arrival_ms"], arrays["prompt_tokens"], arrays["output_tokens"])
    print("begins", flush=True)
    seen = asyncio.run(ask(trace, time_scale, urls))
    names = [each.name for each in fields(scoring.Seen)]
    scoring.write_seen(seen_file, scoring.Seen(**{name: getattr(seen, name) for name in names}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), sys.argv[4:])
