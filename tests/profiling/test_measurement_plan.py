import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest

from cleave.perf.profile import iteration_fit, profile
from cleave.profiling import measurement_plan
from cleave.profiling.client import OpenAIClient
from cleave.profiling.engine_info import EngineInfo, inspect_engine
from cleave.profiling.errors import BatchNotFormedError, ProfilingError
from cleave.profiling.measurement_plan import (
    ProbeResult,
    ProfilingSettings,
    list_prompt_lengths,
    measure,
    plan_measurements,
)
from cleave.profiling.measurements import (
    BatchMeasurement,
    DecodeCase,
    DecodeMeasurement,
    PrefillCase,
    PromptMeasurement,
    Sample,
)
from cleave.profiling.profile_points import build_profile, compute_spread_share, list_scattered

Serve = Callable[..., Awaitable]
FACTS = EngineInfo("m", "opt-13b", "emulated", "1", 2048, 16, 1000)
TINY = ProfilingSettings(
    repeats=2, batches=(1, 4), contexts=(32,), steps_per_octave=1, max_spread=1e9
)


def hide(_done: int, _total: int, _what: str) -> None:
    pass


def test_lengths_cover_the_range_evenly_on_a_logarithmic_scale() -> None:
    assert list_prompt_lengths(100, 1) == [16, 32, 64, 100]
    assert list_prompt_lengths(64, 2) == [16, 23, 32, 45, 64]


def test_no_shot_exceeds_the_engine() -> None:
    look = ProbeResult({16: 20.0, 512: 70.0, 1024: 130.0}, overhead_ms=1.0)
    settings = ProfilingSettings(contexts=(64, 1024, 4096))
    shots = list(plan_measurements(FACTS, settings, look))
    prompts = [shot.tokens for shot in shots if isinstance(shot, PromptMeasurement)]
    assert max(prompts) == 1024
    batches = [shot for shot in shots if isinstance(shot, BatchMeasurement)]
    assert batches
    assert all(shot.prompts * shot.tokens <= 1024 for shot in batches)
    decodes = [shot for shot in shots if isinstance(shot, DecodeMeasurement)]
    assert {shot.prompt_tokens for shot in decodes} == {64, 1024}
    for shot in decodes:
        assert shot.batch * shot.prompt_tokens < FACTS.kv_capacity_tokens
        assert shot.prompt_tokens + shot.output_tokens <= FACTS.max_model_len


def test_batches_of_prompts_are_left_out_where_passes_are_shorter_than_http() -> None:
    look = ProbeResult({16: 1.0, 1024: 3.0}, overhead_ms=1.0)
    assert not [
        s
        for s in plan_measurements(FACTS, ProfilingSettings(), look)
        if isinstance(s, BatchMeasurement)
    ]


def test_spread_is_that_of_the_middle_half() -> None:
    assert compute_spread_share([10.0]) == 0.0
    assert compute_spread_share([10.0, 10.0, 10.0, 10.0, 99.0]) == 0.0
    assert compute_spread_share([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(0.2)


def test_points_that_scatter_are_named() -> None:
    samples = {
        DecodeCase(8, 64): [Sample(DecodeCase(8, 64), ms) for ms in (10.0, 20.0, 30.0)],
        PrefillCase(1, 64): [Sample(PrefillCase(1, 64), ms) for ms in (10.0, 10.1, 10.2)],
    }
    assert list_scattered(samples, 0.15) == ["decoding 8 x 64 tokens: 50% of 20.00 ms"]


@dataclass(eq=False)
class Noisy:
    """A shot that scatters until it has run often enough."""

    label: str = "noisy"
    runs: list[float] = field(default_factory=list)

    async def run(self, client: OpenAIClient, rng: random.Random) -> list[Sample]:
        self.runs.append(10.0 if len(self.runs) > 3 else 10.0 + 10.0 * (len(self.runs) % 2))
        return [Sample(PrefillCase(1, 64), self.runs[-1])]


@dataclass(eq=False)
class Steady:
    label: str = "steady"
    runs: int = 0

    async def run(self, client: OpenAIClient, rng: random.Random) -> list[Sample]:
        self.runs += 1
        return [Sample(PrefillCase(1, 128), 10.0)]


async def test_what_scatters_is_measured_up_to_three_times_as_often(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await serve()
    noisy, steady = Noisy(), Steady()
    monkeypatch.setattr(measurement_plan, "plan_measurements", lambda *_: [noisy, steady])
    settings = replace(TINY, repeats=4, max_spread=0.15)
    await measure(OpenAIClient(running.url, "m"), FACTS, settings, hide)
    assert steady.runs == 4
    assert 4 < len(noisy.runs) <= 12


@dataclass(eq=False)
class TooLong:
    """A batch whose first streams are over before the last request decodes."""

    label: str = "too long"
    runs: int = 0

    async def run(self, client: OpenAIClient, rng: random.Random) -> list[Sample]:
        self.runs += 1
        raise BatchNotFormedError("a stream ended before the others joined")


async def test_a_batch_that_cannot_be_formed_is_left_out(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await serve()
    too_long, steady = TooLong(), Steady()
    monkeypatch.setattr(measurement_plan, "plan_measurements", lambda *_: [too_long, steady])
    samples, left_out = await measure(OpenAIClient(running.url, "m"), FACTS, TINY, hide)
    assert (too_long.runs, list(samples)) == (1, [PrefillCase(1, 128)])
    assert left_out == ["too long: a stream ended before the others joined"]


async def test_a_measured_engine_becomes_a_profile_that_can_be_read(
    serve: Serve, tmp_path: pytest.TempPathFactory
) -> None:
    running = await serve(time_scale=0.05)
    client = OpenAIClient(running.url, "m")
    facts = await inspect_engine(client, None)
    samples, left_out = await measure(client, facts, TINY, hide)
    assert not left_out
    found = build_profile(
        samples,
        facts,
        device="CPU",
        measured_at="2026-01-01",
        software={"emulated": facts.version},
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
    )
    path = tmp_path / "profile.yaml"
    profile.write_profile(found, path)
    assert profile.read_profile(path) == found
    assert [p.tokens for p in found.prefill if p.prompts == 1] == [16, 32, 64, 128, 256, 512]
    assert {d.batch for d in found.decode} == {1, 4}
    assert found.mixed
    assert found.kv_capacity_tokens == facts.kv_capacity_tokens
    assert iteration_fit.to_timing(found).predict_prefill_ms([100]) > 0
    assert running.engine.num_requests == 0


async def test_an_engine_in_use_is_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    running = await serve(time_scale=10.0)
    monkeypatch.setattr(measurement_plan, "_IDLE_TIMEOUT_S", 0.1)
    client = OpenAIClient(running.url, "m")
    other = asyncio.create_task(client.complete([9] * 20, 100))
    await asyncio.sleep(0.2)
    with pytest.raises(ProfilingError, match="busy with other requests"):
        await measure(client, FACTS, TINY, hide)
    other.cancel()


async def test_an_engine_for_short_prompts_alone_is_refused(serve: Serve) -> None:
    running = await serve()
    facts = replace(FACTS, max_model_len=20)
    with pytest.raises(ProfilingError, match="too short to measure"):
        await measure(OpenAIClient(running.url, "m"), facts, TINY, hide)
