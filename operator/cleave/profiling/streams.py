"""Concurrent streams and the arrival times of their tokens.

Used by the measurements. What is hard: streams start decoding one after another, so they request
more tokens than are needed and are aborted after the measurement.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from cleave.profiling.client import Client
from cleave.profiling.errors import ProfilingError, single_fault

Times = list[float]


class Streams:
    """Arrival times of the tokens of several streams, in seconds of the loop's clock."""

    def __init__(self, count: int) -> None:
        self.token_s: list[Times] = [[] for _ in range(count)]
        self._goals: list[int] = []
        self._short = 0
        self._reached = asyncio.Event()

    def note(self, stream: int, now: float, count: int) -> None:
        """Record `count` tokens of a stream that arrived at `now`."""
        times = self.token_s[stream]
        times += [now] * count
        if self._short and len(times) - count < self._goals[stream] <= len(times):
            self._short -= 1
            if not self._short:
                self._reached.set()

    async def more(self, tokens: int) -> None:
        """Wait until each stream has received that many further tokens."""
        self._goals = [len(times) + tokens for times in self.token_s]
        self._short = len(self._goals)
        self._reached.clear()
        await self._reached.wait()


@asynccontextmanager
async def streaming(
    client: Client, prompts: Sequence[Sequence[int]], output_tokens: int, settle: int
) -> AsyncIterator[Streams]:
    """Streams of all `prompts`, each with at least `settle` tokens; aborted on exit.

    Raises ProfilingError when a stream fails or ends inside the context.
    """
    streams = Streams(len(prompts))

    async def run(index: int) -> None:
        await client.complete(
            prompts[index], output_tokens, lambda now, count: streams.note(index, now, count)
        )
        raise ProfilingError(
            f"{client.url}: a stream of {output_tokens} tokens ended before the others joined; "
            "measure smaller batches"
        )

    async with single_fault(), asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(index)) for index in range(len(prompts))]
        await streams.more(settle)
        yield streams
        for task in tasks:
            task.cancel()
