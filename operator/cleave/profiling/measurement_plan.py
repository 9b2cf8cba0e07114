"""Which points of an engine are measured, in what order, and how often.

Called by `cleave profile`: 1. a short probe (times of prompts, and how many tokens fit in one
iteration); 2. repeated measurements in random order, so that a temporary slowdown of the machine
affects all points equally; 3. further repeats of points that scatter. Every wait has a timeout.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from cleave.profiling.client import Client
from cleave.profiling.engine_info import EngineFacts, read_load
from cleave.profiling.errors import ProfilingError
from cleave.profiling.measurements import (
    BatchShot,
    DecodeShot,
    Front,
    PromptShot,
    Sample,
    Shot,
    What,
)
from cleave.profiling.profile_points import spread_share

Show = Callable[[int, int, str], None]
"""Called with measurements done, their total, and a label of the current one."""

Taken = dict[What, list[Sample]]
"""Samples by point."""

_MOST_TURNS = 3
_IDLE_TIMEOUT_S = 60.0
_IDLE_PERIOD_S = 0.02
_SHORTEST = 16
_KV_SHARE = 0.8
"""Share of the KV cache that measured requests may fill; more would cause preemptions."""
_LONGEST_STREAM = 4096
"""Tokens that a stream requests; it is aborted long before."""
_PLUG_FRONTS = 4.0
"""A plug prompt must take at least this many times the overhead of HTTP."""
_SHOT_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Settings:
    """The extent of the measurements."""

    repeats: int = 5
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    contexts: tuple[int, ...] = (64, 512, 2048, 8192)
    """Prompt tokens of each decoding request."""
    steps_per_octave: int = 2
    """Number of prompt lengths per doubling."""
    longest_prompt: int = 1 << 20
    longest_fill_s: float = 20.0
    """Batches whose prompts would take longer to compute are skipped."""
    max_spread: float = 0.15
    """A point with a larger relative spread is measured up to three times as often."""
    seed: int = 0


QUICK = Settings(repeats=3, batches=(1, 8, 32), contexts=(64, 1024), steps_per_octave=1)
"""A coarse profile in about a minute; use the defaults for plans that matter."""


@dataclass(frozen=True, slots=True)
class Look:
    """The result of the short probe."""

    pass_ms: Mapping[int, float]
    """Prompt tokens -> ms, for lengths that fit in one iteration."""
    front_ms: float

    @property
    def longest(self) -> int:
        """Prompt tokens of the longest prompt that fits in one iteration."""
        return max(self.pass_ms)


async def measure(client: Client, facts: EngineFacts, settings: Settings, show: Show) -> Taken:
    """Measure all points; samples by point, without points that could not be observed.

    Raises ProfilingError; no request runs on the engine afterwards.
    """
    rng = random.Random(settings.seed)
    await _until_idle(client)
    look = await look_around(client, facts, settings, rng, show)
    taken: dict[Shot, Taken] = {
        shot: defaultdict(list) for shot in choose_shots(facts, settings, look)
    }
    done, total = 0, len(taken) * settings.repeats
    for repeat in range(settings.repeats * _MOST_TURNS):
        pending = list(taken)
        if repeat >= settings.repeats:
            pending = [shot for shot in taken if _scatters(taken[shot], settings)]
            total += len(pending)
        for shot in rng.sample(pending, len(pending)):
            show(done, total, shot.label)
            await _run(client, shot, rng, taken[shot])
            done += 1
    merged: Taken = defaultdict(list)
    for shot, samples in taken.items():
        for what in _usual(shot, samples):
            merged[what] += samples[what]
    return dict(merged)


async def look_around(
    client: Client, facts: EngineFacts, settings: Settings, rng: random.Random, show: Show
) -> Look:
    """Measure prompts of doubling length until one takes two iterations; warms up the engine."""
    pass_ms: dict[int, float] = {}
    overheads: list[float] = []
    usual = 0
    last = _limit(facts, settings)
    for tokens in lengths(last, 1):
        show(0, 0, f"probe: {tokens} tokens")
        shot = PromptShot(tokens)
        await shot.run(client, rng)
        (prompt, overhead), iterations = await shot.run_counted(client, rng)
        usual = usual or iterations
        if iterations > usual:
            break
        pass_ms[tokens] = prompt.ms
        overheads.append(overhead.ms)
    return Look(pass_ms, min(overheads))


def choose_shots(facts: EngineFacts, settings: Settings, look: Look) -> Iterator[Shot]:
    """All useful measurements within the engine's limits."""
    longest = look.longest
    for tokens in lengths(longest, settings.steps_per_octave):
        yield PromptShot(tokens)
    plug_ms = look.pass_ms[longest]
    if plug_ms > look.front_ms * _PLUG_FRONTS:
        wait_s = (look.front_ms + plug_ms / 4) / 1e3
        for tokens in lengths(longest // 4, 1):
            for prompts in sorted({2, 4, longest // tokens // 2}):
                if 1 < prompts <= 64 and prompts * tokens <= longest:
                    yield BatchShot(prompts, tokens, longest, wait_s)
    room = facts.kv_capacity_tokens * _KV_SHARE
    for batch in settings.batches:
        mixed = tuple(t for t in (longest // 8, longest // 2) if t >= _SHORTEST)
        for context in settings.contexts:
            output = min(_LONGEST_STREAM, facts.max_model_len - context)
            fill_s = batch * _fill_ms(look, context) / 1e3
            fits = batch * (context + _SHORTEST * 8) <= room and output >= _SHORTEST * 8
            if fits and fill_s <= settings.longest_fill_s:
                yield DecodeShot(batch, context, mixed, output)


def lengths(last: int, steps_per_octave: int) -> list[int]:
    """Prompt lengths from 16 to `last`, evenly on a logarithmic scale, both ends included."""
    result = []
    step = 0
    while (tokens := round(_SHORTEST * 2 ** (step / steps_per_octave))) < last:
        result.append(tokens)
        step += 1
    return [*result, last]


async def _run(client: Client, shot: Shot, rng: random.Random, taken: Taken) -> None:
    try:
        async with asyncio.timeout(_SHOT_TIMEOUT_S):
            for sample in await shot.run(client, rng):
                taken[sample.what].append(sample)
            await _until_idle(client)
    except TimeoutError:
        raise ProfilingError(
            f"{shot.label}: not done in {_SHOT_TIMEOUT_S:.0f} s; is the engine in use, or hung?"
        ) from None


async def _until_idle(client: Client) -> None:
    """Wait until the engine has aborted all requests. Raises ProfilingError when it stays busy."""
    deadline = asyncio.get_running_loop().time() + _IDLE_TIMEOUT_S
    while await read_load(client):
        if asyncio.get_running_loop().time() > deadline:
            raise ProfilingError(f"{client.url} is busy with other requests; stop its traffic")
        await asyncio.sleep(_IDLE_PERIOD_S)


def _usual(shot: Shot, samples: Taken) -> list[What]:
    """The points to keep; of a batch that was not always formed in full, the most frequent size."""
    if isinstance(shot, BatchShot) and samples:
        return [max(samples, key=lambda what: len(samples[what]))]
    return list(samples)


def _scatters(taken: Taken, settings: Settings) -> bool:
    return any(
        spread_share([sample.ms for sample in samples]) > settings.max_spread
        for what, samples in taken.items()
        if not isinstance(what, Front)
    )


def _limit(facts: EngineFacts, settings: Settings) -> int:
    room = int(facts.kv_capacity_tokens * _KV_SHARE)
    last = min(facts.max_model_len - 1, settings.longest_prompt, room)
    if last < 2 * _SHORTEST:
        raise ProfilingError(f"prompts of up to {last} tokens are too short to measure anything")
    return last


def _fill_ms(look: Look, tokens: int) -> float:
    """Rough time of one prompt, scaled from the nearest shorter prompt of the probe."""
    measured = max((t for t in look.pass_ms if t <= tokens), default=min(look.pass_ms))
    return look.pass_ms[measured] * max(1.0, tokens / measured)
