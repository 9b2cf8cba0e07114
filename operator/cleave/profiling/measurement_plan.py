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
from itertools import count, takewhile

from cleave.profiling.client import OpenAIClient
from cleave.profiling.engine_info import EngineInfo, count_requests
from cleave.profiling.errors import BatchNotFormedError, ProfilingError
from cleave.profiling.measurements import (
    BatchMeasurement,
    DecodeMeasurement,
    MeasuredCase,
    Measurement,
    OverheadCase,
    PromptMeasurement,
    Sample,
)
from cleave.profiling.profile_points import compute_spread_share

ReportProgress = Callable[[int, int, str], None]
"""Called with measurements done, their total, and a label of the current one."""

SamplesByCase = dict[MeasuredCase, list[Sample]]
"""Samples by point."""

_MAX_REPEAT_FACTOR = 3
_IDLE_TIMEOUT_S = 60.0
_IDLE_PERIOD_S = 0.02
_MIN_PROMPT_TOKENS = 16
_KV_SHARE = 0.8
"""Share of the KV cache that measured requests may fill; more would cause preemptions."""
_STREAM_TOKENS = 4096
"""Tokens that a stream requests; it is aborted long before."""
_MIN_PLUG_OVERHEADS = 4.0
"""A plug prompt must take at least this many times the overhead of HTTP."""
_MEASUREMENT_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class ProfilingSettings:
    """The extent of the measurements."""

    repeats: int = 5
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    contexts: tuple[int, ...] = (64, 512, 2048, 8192)
    """Prompt tokens of each decoding request."""
    steps_per_octave: int = 2
    """Number of prompt lengths per doubling."""
    max_prompt_tokens: int = 1 << 20
    max_fill_s: float = 20.0
    """Batches whose prompts would take longer to compute are skipped."""
    max_spread: float = 0.15
    """A point with a larger relative spread is measured up to three times as often."""
    seed: int = 0


QUICK = ProfilingSettings(repeats=3, batches=(1, 8, 32), contexts=(64, 1024), steps_per_octave=1)
"""A coarse profile in about a minute; use the defaults for plans that matter."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of the short probe."""

    iteration_ms: Mapping[int, float]
    """Prompt tokens -> ms, for lengths that fit in one iteration."""
    overhead_ms: float

    @property
    def longest_tokens(self) -> int:
        """Prompt tokens of the longest prompt that fits in one iteration."""
        return max(self.iteration_ms)


async def measure(
    client: OpenAIClient, facts: EngineInfo, settings: ProfilingSettings, show: ReportProgress
) -> tuple[SamplesByCase, list[str]]:
    """Measure all points; samples by point, and which batches could not be observed and why. Raises
    ProfilingError; no request runs on the engine afterwards."""
    rng = random.Random(settings.seed)
    await _wait_until_idle(client)
    look = await probe_engine(client, facts, settings, rng, show)
    taken: dict[Measurement, SamplesByCase] = {
        shot: defaultdict(list) for shot in plan_measurements(facts, settings, look)
    }
    done, total = 0, len(taken) * settings.repeats
    failed: dict[Measurement, str] = {}
    for repeat in range(settings.repeats * _MAX_REPEAT_FACTOR):
        pending = [shot for shot in taken if shot not in failed]
        if repeat >= settings.repeats:
            pending = [shot for shot in pending if _is_scattered(taken[shot], settings)]
            total += len(pending)
        for shot in rng.sample(pending, len(pending)):
            show(done, total, shot.label)
            try:
                await _run(client, shot, rng, taken[shot])
            except BatchNotFormedError as error:
                failed[shot] = str(error)
                total -= max(settings.repeats - repeat - 1, 0)
                await _wait_until_idle(client)
            done += 1
    merged: SamplesByCase = defaultdict(list)
    for shot, samples in taken.items():
        for what in _select_cases(shot, samples):
            merged[what] += samples[what]
    left_out = [f"{shot.label}: {why}" for shot, why in failed.items() if not taken[shot]]
    return dict(merged), left_out


async def probe_engine(
    client: OpenAIClient,
    facts: EngineInfo,
    settings: ProfilingSettings,
    rng: random.Random,
    show: ReportProgress,
) -> ProbeResult:
    """Measure prompts of doubling length until one takes two iterations; warms up the engine."""
    pass_ms: dict[int, float] = {}
    overheads: list[float] = []
    usual = 0
    last = _compute_max_prompt_tokens(facts, settings)
    for tokens in list_prompt_lengths(last, 1):
        show(0, 0, f"probe: {tokens} tokens")
        shot = PromptMeasurement(tokens)
        await shot.run(client, rng)
        (prompt, overhead), iterations = await shot.run_counted(client, rng)
        usual = usual or iterations
        if iterations > usual:
            break
        pass_ms[tokens] = prompt.ms
        overheads.append(overhead.ms)
    return ProbeResult(pass_ms, min(overheads))


def plan_measurements(
    facts: EngineInfo, settings: ProfilingSettings, look: ProbeResult
) -> Iterator[Measurement]:
    """All useful measurements within the engine's limits."""
    longest = look.longest_tokens
    for tokens in list_prompt_lengths(longest, settings.steps_per_octave):
        yield PromptMeasurement(tokens)
    plug_ms = look.iteration_ms[longest]
    if plug_ms > look.overhead_ms * _MIN_PLUG_OVERHEADS:
        wait_s = (look.overhead_ms + plug_ms / 4) / 1e3
        for tokens in list_prompt_lengths(longest // 4, 1):
            for prompts in sorted({2, 4, longest // tokens // 2}):
                if 1 < prompts <= 64 and prompts * tokens <= longest:
                    yield BatchMeasurement(prompts, tokens, longest, wait_s)
    room = facts.kv_capacity_tokens * _KV_SHARE
    for batch in settings.batches:
        mixed = tuple(t for t in (longest // 8, longest // 2) if t >= _MIN_PROMPT_TOKENS)
        for context in settings.contexts:
            output = min(_STREAM_TOKENS, facts.max_model_len - context)
            fill_s = batch * _estimate_prompt_ms(look, context) / 1e3
            least = _MIN_PROMPT_TOKENS * 8
            fits = batch * (context + least) <= room and output >= least
            if fits and fill_s <= settings.max_fill_s:
                yield DecodeMeasurement(batch, context, mixed, output)


def list_prompt_lengths(last: int, steps_per_octave: int) -> list[int]:
    """Prompt lengths from 16 to `last`, evenly on a logarithmic scale, both ends included."""
    lengths = (round(_MIN_PROMPT_TOKENS * 2 ** (step / steps_per_octave)) for step in count())
    return [*takewhile(lambda tokens: tokens < last, lengths), last]


async def _run(
    client: OpenAIClient, shot: Measurement, rng: random.Random, taken: SamplesByCase
) -> None:
    try:
        async with asyncio.timeout(_MEASUREMENT_TIMEOUT_S):
            for sample in await shot.run(client, rng):
                taken[sample.case].append(sample)
            await _wait_until_idle(client)
    except TimeoutError:
        raise ProfilingError(
            f"{shot.label}: not done in {_MEASUREMENT_TIMEOUT_S:.0f} s; "
            "is the engine in use, or hung?"
        ) from None


async def _wait_until_idle(client: OpenAIClient) -> None:
    """Wait until the engine has aborted all requests. Raises ProfilingError when it stays busy."""
    deadline = asyncio.get_running_loop().time() + _IDLE_TIMEOUT_S
    while await count_requests(client):
        if asyncio.get_running_loop().time() > deadline:
            raise ProfilingError(f"{client.url} is busy with other requests; stop its traffic")
        await asyncio.sleep(_IDLE_PERIOD_S)


def _select_cases(shot: Measurement, samples: SamplesByCase) -> list[MeasuredCase]:
    """The points to keep; of a batch that was not always formed in full, the most frequent size."""
    if isinstance(shot, BatchMeasurement) and samples:
        return [max(samples, key=lambda what: len(samples[what]))]
    return list(samples)


def _is_scattered(taken: SamplesByCase, settings: ProfilingSettings) -> bool:
    return any(
        compute_spread_share([sample.ms for sample in samples]) > settings.max_spread
        for what, samples in taken.items()
        if not isinstance(what, OverheadCase)
    )


def _compute_max_prompt_tokens(facts: EngineInfo, settings: ProfilingSettings) -> int:
    room = int(facts.kv_capacity_tokens * _KV_SHARE)
    last = min(facts.max_model_len - 1, settings.max_prompt_tokens, room)
    if last < 2 * _MIN_PROMPT_TOKENS:
        raise ProfilingError(f"prompts of up to {last} tokens are too short to measure anything")
    return last


def _estimate_prompt_ms(look: ProbeResult, tokens: int) -> float:
    """Rough time of one prompt, scaled from the nearest shorter prompt of the probe."""
    measured = max((t for t in look.iteration_ms if t <= tokens), default=min(look.iteration_ms))
    return look.iteration_ms[measured] * max(1.0, tokens / measured)
