"""What is measured at one go: a prompt, prompts in one pass, decoding with prompts thrown in.

A shot runs once and gives samples: (point without its duration, milliseconds). Rounds of shots are
`cleave.profiling.rounds`'. What is hard: a client sees passes only from outside, so it looks at
what the fixed cost of HTTP cannot reach: gaps between tokens, and the engine's own clock for
prompts that run alone. Every prompt is new, or the prefix cache would answer for the engine.
"""

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Protocol

from cleave.profiling.client import Client
from cleave.profiling.engine import read_counters
from cleave.profiling.errors import ProfilingError, single_fault
from cleave.profiling.streams import Streams, streaming

_TOKEN_IDS = range(8, 250)
"""In every vocabulary, and no special tokens in most."""
_SETTLE_TOKENS = 3
_WINDOW_TOKENS = 24
_SAME_PASS = 0.2
"""Tokens that come within this share of a pass are of one pass."""


@dataclass(frozen=True, slots=True, order=True)
class Prefill:
    """One pass over `prompts` whole prompts of `tokens` each."""

    prompts: int
    tokens: int


@dataclass(frozen=True, slots=True, order=True)
class Decode:
    """One token for each of `batch` requests."""

    batch: int
    prompt_tokens: int
    """Of each request; its context has grown a little when it is measured."""


@dataclass(frozen=True, slots=True, order=True)
class Mixed:
    """One pass with a whole prompt and a token for each of `batch` requests."""

    batch: int
    context_prompt_tokens: int
    """As `Decode.prompt_tokens`."""
    prompt_tokens: int


@dataclass(frozen=True, slots=True, order=True)
class Front:
    """HTTP and the engine's front: what a client waits beyond the engine's own clock."""

    tokens: int


What = Prefill | Decode | Mixed | Front


@dataclass(frozen=True, slots=True)
class Sample:
    """One observation."""

    what: What
    ms: float
    context_tokens: int = 0
    """Of all decoding requests together, in the pass."""


class Shot(Protocol):
    """Measures once."""

    @property
    def label(self) -> str:
        """A few words for the progress bar."""

    async def run(self, client: Client, rng: random.Random) -> Sequence[Sample]:
        """The samples it could take, perhaps none. Raises ProfilingError."""


@dataclass(frozen=True, slots=True)
class PromptShot:
    """One prompt alone, by the engine's clock from being scheduled to the first token."""

    tokens: int

    @property
    def label(self) -> str:
        """A few words for the progress bar."""
        return f"a prompt of {self.tokens} tokens"

    async def run(self, client: Client, rng: random.Random) -> list[Sample]:
        """Two samples: the pass, and what the client waited on top."""
        sample, _ = await self.run_counted(client, rng)
        return sample

    async def run_counted(self, client: Client, rng: random.Random) -> tuple[list[Sample], int]:
        """The samples and how many passes the engine made."""
        before = await read_counters(client)
        answer = await client.complete(draw(rng, self.tokens), 1)
        after = await read_counters(client, before.prefills + 1)
        ms = (after.prefill_s - before.prefill_s) * 1e3 / (after.prefills - before.prefills)
        samples = [
            Sample(Prefill(1, self.tokens), ms),
            Sample(Front(self.tokens), max(0.0, answer.ttft_ms - ms)),
        ]
        return samples, after.passes - before.passes


@dataclass(frozen=True, slots=True)
class BatchShot:
    """Several prompts in one pass: sent while another prompt, the plug, keeps the engine busy."""

    prompts: int
    tokens: int
    plug_tokens: int
    wait_s: float
    """After which the plug's pass is under way."""

    @property
    def label(self) -> str:
        """A few words for the progress bar."""
        return f"{self.prompts} prompts of {self.tokens} tokens"

    async def run(self, client: Client, rng: random.Random) -> list[Sample]:
        """One sample of the largest group that came together; none when all came one by one.

        An engine that plans the next pass ahead takes the first prompt alone, so the group may be
        smaller than what was sent.
        """
        prompts = [draw(rng, self.tokens) for _ in range(self.prompts)]
        async with single_fault(), asyncio.TaskGroup() as group:
            plug = group.create_task(client.complete(draw(rng, self.plug_tokens), 1))
            await asyncio.sleep(self.wait_s)
            tasks = [group.create_task(client.complete(prompt, 1)) for prompt in prompts]
        ends = sorted([plug.result().token_s[0], *(task.result().token_s[0] for task in tasks)])
        size, seconds = max(group_passes(ends), default=(0, 0.0))
        return [Sample(Prefill(size, self.tokens), seconds * 1e3)] if size > 1 else []


@dataclass(frozen=True, slots=True)
class DecodeShot:
    """Requests that decode together, then the same with prompts thrown in."""

    batch: int
    prompt_tokens: int
    mixed_tokens: tuple[int, ...]
    output_tokens: int
    """Asked for, per request; cut off long before."""

    @property
    def label(self) -> str:
        """A few words for the progress bar."""
        return f"decoding {self.batch} x {self.prompt_tokens} tokens"

    async def run(self, client: Client, rng: random.Random) -> list[Sample]:
        """One sample of decoding and one for each prompt thrown in."""
        prompts = [draw(rng, self.prompt_tokens) for _ in range(self.batch)]
        async with streaming(client, prompts, self.output_tokens, _SETTLE_TOKENS) as streams:
            firsts = [len(times) for times in streams.token_s]
            await streams.more(_WINDOW_TOKENS)
            samples = [self._read_window(streams, firsts)]
            for tokens in self.mixed_tokens:
                samples.append(await self._throw_in(client, streams, tokens, rng))
        return samples

    def _read_window(self, streams: Streams, firsts: Sequence[int]) -> Sample:
        gaps: list[float] = []
        contexts: list[int] = []
        for times, first in zip(streams.token_s, firsts, strict=True):
            gaps += [after - before for before, after in pairwise(times[first - 1 :])]
            # The pass that makes token k + 1 reads the prompt and k tokens.
            contexts += range(self.prompt_tokens + first, self.prompt_tokens + len(times))
        context = round(sum(contexts) / len(contexts) * self.batch)
        ms = median(gaps) * 1e3
        if ms <= 0:
            raise ProfilingError(
                f"{self.batch} streams come in bursts, not token by token: the engine's front or "
                "this machine is too slow to see its passes; measure smaller batches"
            )
        return Sample(Decode(self.batch, self.prompt_tokens), ms, context)

    async def _throw_in(
        self, client: Client, streams: Streams, tokens: int, rng: random.Random
    ) -> Sample:
        """The longest gap of each stream while a prompt runs; the median of them."""
        firsts = [len(times) for times in streams.token_s]
        await client.complete(draw(rng, tokens), 1)
        await streams.more(_SETTLE_TOKENS)
        longest = [
            max(after - before for before, after in pairwise(times[first - 1 :]))
            for times, first in zip(streams.token_s, firsts, strict=True)
        ]
        context = self.prompt_tokens * self.batch + sum(firsts)
        what = Mixed(self.batch, self.prompt_tokens, tokens)
        return Sample(what, median(longest) * 1e3, context)


def draw(rng: random.Random, tokens: int) -> list[int]:
    """A prompt of that many tokens that nobody has asked before."""
    return rng.choices(_TOKEN_IDS, k=tokens)


def group_passes(end_s: Sequence[float]) -> Iterator[tuple[int, float]]:
    """(first tokens in a pass, its seconds) for each pass but the first.

    `end_s`: when first tokens came, ascending, of passes without a pause between them.
    """
    longest = max(after - before for before, after in pairwise(end_s))
    groups = [[end_s[0]]]
    for before, after in pairwise(end_s):
        if after - before > longest * _SAME_PASS:
            groups.append([])
        groups[-1].append(after)
    for former, group in pairwise(groups):
        yield len(group), median(group) - median(former)
