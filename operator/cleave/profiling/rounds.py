"""Which points of an engine are measured, in what order, and how often.

Called by `cleave profile`. A short look first (how long is a prompt, how many fit in a pass), then
rounds over all shots in random order, so that a machine that slows down for a while slows all
points alike, then further rounds of those that scattered. Every wait has a bound.
"""

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from cleave.profiling.client import Client
from cleave.profiling.engine import EngineFacts, read_load
from cleave.profiling.errors import ProfilingError
from cleave.profiling.points import spread_share
from cleave.profiling.shots import (
    BatchShot,
    DecodeShot,
    Front,
    PromptShot,
    Sample,
    Shot,
    What,
)

Show = Callable[[int, int, str], None]
"""Shots done, shots in all, what is being measured."""

Taken = dict[What, list[Sample]]
"""Samples by point."""

_MOST_TURNS = 3
_IDLE_TIMEOUT_S = 60.0
_IDLE_PERIOD_S = 0.02
_SHORTEST = 16
_KV_SHARE = 0.8
"""Of the KV cache that measured requests may fill: more would preempt."""
_LONGEST_STREAM = 4096
"""Tokens that a stream asks for; it is cut off long before."""
_PLUG_FRONTS = 4.0
"""A plug must last this many times the cost of HTTP."""
_SHOT_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How much is measured."""

    repeats: int = 5
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    contexts: tuple[int, ...] = (64, 512, 2048, 8192)
    """Prompt tokens of each decoding request."""
    steps_per_octave: int = 2
    """Prompt lengths between a length and its double."""
    longest_prompt: int = 1 << 20
    longest_fill_s: float = 20.0
    """Batches whose prompts would take longer to compute are left out."""
    max_spread: float = 0.15
    """A point that scatters more is measured up to three times as often."""
    seed: int = 0


QUICK = Settings(repeats=3, batches=(1, 8, 32), contexts=(64, 1024), steps_per_octave=1)
"""A look in a minute or so; for plans that matter take the whole."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a short look found."""

    pass_ms: Mapping[int, float]
    """Prompt tokens -> one pass, for lengths that are one pass."""
    front_ms: float

    @property
    def longest(self) -> int:
        """Prompt tokens of the longest single pass found."""
        return max(self.pass_ms)


async def measure(client: Client, facts: EngineFacts, settings: Settings, show: Show) -> Taken:
    """All samples by point; points that could not be seen are absent.

    Raises ProfilingError; nothing runs on the engine when this has returned.
    """
    rng = random.Random(settings.seed)
    await _until_idle(client)
    look = await look_around(client, facts, settings, rng, show)
    taken: dict[Shot, Taken] = {
        shot: defaultdict(list) for shot in choose_shots(facts, settings, look)
    }
    done, total = 0, len(taken) * settings.repeats
    for turn in range(settings.repeats * _MOST_TURNS):
        pending = list(taken)
        if turn >= settings.repeats:
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
    """Prompts of doubling length until one takes two passes; the engine is warm afterwards."""
    pass_ms: dict[int, float] = {}
    fronts: list[float] = []
    usual = 0
    last = _limit(facts, settings)
    for tokens in lengths(last, 1):
        show(0, 0, f"a look: {tokens} tokens")
        shot = PromptShot(tokens)
        await shot.run(client, rng)
        (prompt, front), passes = await shot.run_counted(client, rng)
        usual = usual or passes
        if passes > usual:
            break
        pass_ms[tokens] = prompt.ms
        fronts.append(front.ms)
    return Look(pass_ms, min(fronts))


def choose_shots(facts: EngineFacts, settings: Settings, look: Look) -> Iterator[Shot]:
    """Everything that is worth measuring within the engine's limits."""
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
    found = []
    step = 0
    while (tokens := round(_SHORTEST * 2 ** (step / steps_per_octave))) < last:
        found.append(tokens)
        step += 1
    return [*found, last]


async def _run(client: Client, shot: Shot, rng: random.Random, taken: Taken) -> None:
    try:
        async with asyncio.timeout(_SHOT_TIMEOUT_S):
            for sample in await shot.run(client, rng):
                taken[sample.what].append(sample)
            await _until_idle(client)
    except TimeoutError:
        raise ProfilingError(
            f"{shot.label}: not over in {_SHOT_TIMEOUT_S:.0f} s; is the engine in use, or hung?"
        ) from None


async def _until_idle(client: Client) -> None:
    """Until the engine has dropped what was cut off. Raises ProfilingError when it stays busy."""
    deadline = asyncio.get_running_loop().time() + _IDLE_TIMEOUT_S
    while await read_load(client):
        if asyncio.get_running_loop().time() > deadline:
            raise ProfilingError(f"{client.url} is busy with other requests; take its traffic away")
        await asyncio.sleep(_IDLE_PERIOD_S)


def _usual(shot: Shot, samples: Taken) -> list[What]:
    """What to keep of a shot; of a batch that fell apart now and then, the size seen most often."""
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
    """Rough time of one prompt, from the nearest shorter one that was seen."""
    seen = max((t for t in look.pass_ms if t <= tokens), default=min(look.pass_ms))
    return look.pass_ms[seen] * max(1.0, tokens / seen)
