"""Single measurements: one prompt, several prompts in one iteration, decoding mixed with prompts.

A measurement runs once and yields samples: (point without its duration, milliseconds);
`cleave.profiling.measurement_plan` repeats them. What is hard: a client cannot observe iterations
directly, so it uses times that exclude the overhead of HTTP: gaps between tokens, and the engine's
own clock for prompts that run alone. Every prompt is new, otherwise the prefix cache would falsify
the times.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Protocol

from cleave.profiling.client import OpenAIClient
from cleave.profiling.engine_info import read_counters
from cleave.profiling.errors import BatchNotFormedError, unwrap_group

_TOKEN_IDS = range(8, 250)
"""Present in every vocabulary, and in most no special tokens."""
_SETTLE_TOKENS = 3
_WINDOW_TOKENS = 24
_SAME_ITERATION_SHARE = 0.2
"""Tokens that arrive within this share of an iteration belong to the same iteration."""


@dataclass(frozen=True, slots=True, order=True)
class PrefillCase:
    """One prefill iteration over `prompts` prompts of `tokens` each."""

    prompts: int
    tokens: int


@dataclass(frozen=True, slots=True, order=True)
class DecodeCase:
    """One decode iteration of `batch` requests."""

    batch: int
    prompt_tokens: int
    """Prompt tokens of each request; its context is slightly longer when it is measured."""


@dataclass(frozen=True, slots=True, order=True)
class MixedCase:
    """One iteration with a prompt and `batch` decoding requests."""

    batch: int
    context_prompt_tokens: int
    """Prompt tokens of each decoding request, as in `DecodeCase`."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True, order=True)
class OverheadCase:
    """Overhead of HTTP and the engine's API server: the client's time minus the engine's own."""

    tokens: int


MeasuredCase = PrefillCase | DecodeCase | MixedCase | OverheadCase


@dataclass(frozen=True, slots=True)
class Sample:
    """One observation."""

    case: MeasuredCase
    ms: float
    context_tokens: int = 0
    """Sum over all decoding requests in the iteration."""


class TokenStreams:
    """Arrival times of the tokens of several streams, in seconds of the loop's clock."""

    def __init__(self, count: int) -> None:
        self.token_s: list[list[float]] = [[] for _ in range(count)]
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

    Streams start decoding one after another, so they request more tokens than are needed. Raises
    ProfilingError when a stream fails or ends inside the context.
    """
    streams = TokenStreams(len(prompts))

    async def run(index: int) -> None:
        await client.complete(
            prompts[index], output_tokens, lambda now, count: streams.record(index, now, count)
        )
        raise BatchNotFormedError(
            f"{client.url}: a stream of {output_tokens} tokens ended before the others joined; "
            "measure smaller batches"
        )

    async with unwrap_group(), asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(index)) for index in range(len(prompts))]
        await streams.wait_for_tokens(settle)
        yield streams
        for task in tasks:
            task.cancel()


class Measurement(Protocol):
    """A measurement that runs once."""

    @property
    def label(self) -> str:
        """A few words for the progress bar."""

    async def run(self, client: OpenAIClient, rng: random.Random) -> Sequence[Sample]:
        """Run it; its samples, possibly none. Raises ProfilingError."""


@dataclass(frozen=True, slots=True)
class PromptMeasurement:
    """One prompt alone, by the engine's clock from scheduling to the first token."""

    tokens: int

    @property
    def label(self) -> str:
        """A few words for the progress bar."""
        return f"a prompt of {self.tokens} tokens"

    async def run(self, client: OpenAIClient, rng: random.Random) -> list[Sample]:
        """Two samples: the prefill, and the overhead of the client's time over it."""
        samples, _ = await self.run_counted(client, rng)
        return samples

    async def run_counted(
        self, client: OpenAIClient, rng: random.Random
    ) -> tuple[list[Sample], int]:
        """(the samples, number of iterations that the engine ran)."""
        before = await read_counters(client)
        completion = await client.complete(draw_prompt(rng, self.tokens), 1)
        after = await read_counters(client, before.prefills + 1)
        ms = (after.prefill_s - before.prefill_s) * 1e3 / (after.prefills - before.prefills)
        samples = [
            Sample(PrefillCase(1, self.tokens), ms),
            Sample(OverheadCase(self.tokens), max(0.0, completion.ttft_ms - ms)),
        ]
        return samples, after.iterations - before.iterations


@dataclass(frozen=True, slots=True)
class BatchMeasurement:
    """Several prompts in one iteration: sent while another prompt, the plug, is computed."""

    prompts: int
    tokens: int
    plug_tokens: int
    wait_s: float
    """Delay after which the plug's iteration runs."""

    @property
    def label(self) -> str:
        """A few words for the progress bar."""
        return f"{self.prompts} prompts of {self.tokens} tokens"

    async def run(self, client: OpenAIClient, rng: random.Random) -> list[Sample]:
        """One sample of the largest group in one iteration; none when all prompts ran alone.

        An engine that schedules the next iteration early takes the first prompt alone, so the group
        may be smaller than the number of prompts.
        """
        prompts = [draw_prompt(rng, self.tokens) for _ in range(self.prompts)]
        async with unwrap_group(), asyncio.TaskGroup() as group:
            plug = group.create_task(client.complete(draw_prompt(rng, self.plug_tokens), 1))
            await asyncio.sleep(self.wait_s)
            tasks = [group.create_task(client.complete(prompt, 1)) for prompt in prompts]
        ends = sorted([plug.result().token_s[0], *(task.result().token_s[0] for task in tasks)])
        size, seconds = max(group_by_iteration(ends), default=(0, 0.0))
        return [Sample(PrefillCase(size, self.tokens), seconds * 1e3)] if size > 1 else []


@dataclass(frozen=True, slots=True)
class DecodeMeasurement:
    """Requests that decode together, first alone, then with prompts added."""

    batch: int
    prompt_tokens: int
    mixed_tokens: tuple[int, ...]
    output_tokens: int
    """Tokens requested per stream; streams are aborted long before."""

    @property
    def label(self) -> str:
        """A few words for the progress bar."""
        return f"decoding {self.batch} x {self.prompt_tokens} tokens"

    async def run(self, client: OpenAIClient, rng: random.Random) -> list[Sample]:
        """One sample of decoding and one for each added prompt."""
        prompts = [draw_prompt(rng, self.prompt_tokens) for _ in range(self.batch)]
        async with open_streams(client, prompts, self.output_tokens, _SETTLE_TOKENS) as streams:
            firsts = [len(times) for times in streams.token_s]
            await streams.wait_for_tokens(_WINDOW_TOKENS)
            samples = [self._read_window(streams, firsts)]
            for tokens in self.mixed_tokens:
                samples.append(await self._measure_mixed(client, streams, tokens, rng))
        return samples

    def _read_window(self, streams: TokenStreams, firsts: Sequence[int]) -> Sample:
        gaps: list[float] = []
        contexts: list[int] = []
        for times, first in zip(streams.token_s, firsts, strict=True):
            gaps += [after - before for before, after in pairwise(times[first - 1 :])]
            # The iteration that yields token k + 1 reads the prompt and k tokens.
            contexts += range(self.prompt_tokens + first, self.prompt_tokens + len(times))
        context = round(sum(contexts) / len(contexts) * self.batch)
        ms = median(gaps) * 1e3
        if ms <= 0:
            raise BatchNotFormedError(
                f"{self.batch} streams come in bursts, not token by token: the engine's front or "
                "this machine is too slow to observe iterations; measure smaller batches"
            )
        return Sample(DecodeCase(self.batch, self.prompt_tokens), ms, context)

    async def _measure_mixed(
        self, client: OpenAIClient, streams: TokenStreams, tokens: int, rng: random.Random
    ) -> Sample:
        """A sample with an added prompt: the median over streams of their longest token gap."""
        firsts = [len(times) for times in streams.token_s]
        await client.complete(draw_prompt(rng, tokens), 1)
        await streams.wait_for_tokens(_SETTLE_TOKENS)
        longest = [
            max(after - before for before, after in pairwise(times[first - 1 :]))
            for times, first in zip(streams.token_s, firsts, strict=True)
        ]
        context = self.prompt_tokens * self.batch + sum(firsts)
        what = MixedCase(self.batch, self.prompt_tokens, tokens)
        return Sample(what, median(longest) * 1e3, context)


def draw_prompt(rng: random.Random, tokens: int) -> list[int]:
    """A random prompt with that many tokens, which no prefix cache holds."""
    return rng.choices(_TOKEN_IDS, k=tokens)


def group_by_iteration(end_s: Sequence[float]) -> Iterator[tuple[int, float]]:
    """(number of first tokens, seconds) of each iteration but the first. `end_s`: ascending arrival
    times of first tokens, from iterations without pauses in between."""
    longest = max(after - before for before, after in pairwise(end_s))
    groups = [[end_s[0]]]
    for before, after in pairwise(end_s):
        if after - before > longest * _SAME_ITERATION_SHARE:
            groups.append([])
        groups[-1].append(after)
    for former, group in pairwise(groups):
        yield len(group), median(group) - median(former)
