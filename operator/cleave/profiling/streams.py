"""Streams that decode side by side, and when their tokens came.

Used by the shots. What is hard: the streams join one after another while the first already decode,
so they ask for more tokens than will be read, and are cut off when enough has been seen.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from cleave.profiling.client import Client
from cleave.profiling.errors import ProfilingError, single_fault

Times = list[float]


class Streams:
    """Tokens of several streams as they come; times in seconds of the loop's clock."""

    def __init__(self, count: int) -> None:
        self.token_s: list[Times] = [[] for _ in range(count)]
        self._goals: list[int] = []
        self._short = 0
        self._reached = asyncio.Event()

    def note(self, stream: int, now: float, count: int) -> None:
        """`count` tokens of a stream came."""
        times = self.token_s[stream]
        times += [now] * count
        if self._short and len(times) - count < self._goals[stream] <= len(times):
            self._short -= 1
            if not self._short:
                self._reached.set()

    async def more(self, tokens: int) -> None:
        """Wait until each stream has that many tokens more than now."""
        self._goals = [len(times) + tokens for times in self.token_s]
        self._short = len(self._goals)
        self._reached.clear()
        await self._reached.wait()


@asynccontextmanager
async def streaming(
    client: Client, prompts: Sequence[Sequence[int]], output_tokens: int, settle: int
) -> AsyncIterator[Streams]:
    """All `prompts` decoding, each with `settle` tokens or more; cut off afterwards.

    Raises ProfilingError when one fails or ends inside.
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
