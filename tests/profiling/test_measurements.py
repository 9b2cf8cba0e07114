import random
from collections.abc import Awaitable, Callable

import pytest

from cleave.profiling.client import OpenAIClient
from cleave.profiling.measurements import (
    BatchMeasurement,
    DecodeCase,
    DecodeMeasurement,
    MixedCase,
    OverheadCase,
    PrefillCase,
    PromptMeasurement,
    TokenStreams,
    draw_prompt,
    group_by_iteration,
)

Serve = Callable[..., Awaitable]


def test_first_tokens_that_come_together_are_of_one_pass() -> None:
    ends = [1.0, 1.5, 1.501, 1.502, 2.0]
    assert [(size, round(s, 3)) for size, s in group_by_iteration(ends)] == [(3, 0.501), (1, 0.499)]


def test_prompts_are_never_sent_twice() -> None:
    rng = random.Random(1)
    assert len({tuple(draw_prompt(rng, 16)) for _ in range(1000)}) == 1000


async def test_a_window_takes_the_median_gap_and_the_mean_context() -> None:
    streams = TokenStreams(2)
    for token in range(11):
        streams.record(0, float(token), 1)
        # One hiccup of the machine must not count.
        streams.record(1, token + (5.0 if token == 7 else 0.1), 1)
    sample = DecodeMeasurement(2, 100, (), 50)._read_window(streams, [1, 1])
    assert sample.case == DecodeCase(2, 100)
    assert sample.ms == pytest.approx(1000)
    assert sample.context_tokens == 2 * 105 + 1, "tokens 2 to 11 read 101 to 110 each"


async def test_a_prompt_alone_gives_its_pass_and_the_front(serve: Serve) -> None:
    running = await serve()
    samples, passes = await PromptMeasurement(64).run_counted(
        OpenAIClient(running.url, "m"), random.Random(0)
    )
    assert [sample.case for sample in samples] == [PrefillCase(1, 64), OverheadCase(64)]
    assert samples[0].ms > 0
    assert passes == 1


async def test_prompts_behind_a_plug_run_together(serve: Serve) -> None:
    running = await serve(time_scale=1.0, max_num_batched_tokens=2048)
    shot = BatchMeasurement(prompts=3, tokens=32, plug_tokens=2000, wait_s=0.05)
    (sample,) = await shot.run(OpenAIClient(running.url, "m"), random.Random(0))
    assert sample.case == PrefillCase(3, 32)


async def test_decoding_is_seen_with_and_without_a_prompt_thrown_in(serve: Serve) -> None:
    running = await serve(time_scale=0.2)
    shot = DecodeMeasurement(batch=4, prompt_tokens=64, mixed_tokens=(32, 256), output_tokens=1000)
    decode, small, large = await shot.run(OpenAIClient(running.url, "m"), random.Random(0))
    assert decode.case == DecodeCase(4, 64)
    assert 4 * 64 < decode.context_tokens < 4 * 64 + 4 * 60
    assert (small.case, large.case) == (MixedCase(4, 64, 32), MixedCase(4, 64, 256))
    assert small.context_tokens < large.context_tokens
