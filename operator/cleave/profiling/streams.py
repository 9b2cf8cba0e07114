"""Concurrent streams and the arrival times of their tokens.

Used by the measurements. What is hard: streams start decoding one after another, so they request
more tokens than are needed and are aborted after the measurement.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from cleave.profiling.client import OpenAIClient
from cleave.profiling.errors import ProfilingError, unwrap_group

Times = list[float]


class TokenStreams:
    """Arrival times of the tokens of several streams, in seconds of the loop's clock."""

    def __init__(self, count: int) -> None:
        self.token_s: list[Times] = [[] for _ in range(count)]
        self._targets: list[int] = []
        self._num_pending = 0
        self._reached = asyncio.Event()

    def record(self, stream: int, now: float, count: int) -> None:
        """Record `count` tokens of a stream that arrived at `now`."""
        times = self.token_s[stream]
        times += [now] * count
        if self._num_pending and len(times) - count < self._targets[stream] <= len(times):
            self._num_pending -= 1
            if not self._num_pending:
                self._reached.set()

    async def wait_for_tokens(self, tokens: int) -> None:
        """Wait until each stream has received that many further tokens."""
        self._targets = [len(times) + tokens for times in self.token_s]
        self._num_pending = len(self._targets)
        self._reached.clear()
        await self._reached.wait()


@asynccontextmanager
async def open_streams(
    client: OpenAIClient, prompts: Sequence[Sequence[int]], output_tokens: int, settle: int
) -> AsyncIterator[TokenStreams]:
    """Streams of all `prompts`, each with at least `settle` tokens; aborted on exit.

    Raises ProfilingError when a stream fails or ends inside the context.
    """
    streams = TokenStreams(len(prompts))

    async def run(index: int) -> None:
        await client.complete(
            prompts[index], output_tokens, lambda now, count: streams.record(index, now, count)
        )
        raise ProfilingError(
            f"{client.url}: a stream of {output_tokens} tokens ended before the others joined; "
            "measure smaller batches"
        )

    async with unwrap_group(), asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(index)) for index in range(len(prompts))]
        await streams.wait_for_tokens(settle)
        yield streams
        for task in tasks:
            task.cancel()
