"""From which length on a prompt is worth a hand-off."""

from dataclasses import replace

import pytest

from cleave.perf.timing import EngineTiming, PromptChunk
from cleave.policy.short_prompts import find_short_prompt_tokens

TIMING = EngineTiming(
    prompt_step=1.0,
    prompt_ms=(10.0, 10.1),
    prompt_square_ms=0.0,
    decode_ms=(10.0, 10.2),
    decode_context_ms=(0.0005,),
)


def find(tpot_ms: float, transfer_ms: float = 5.0, timing: EngineTiming = TIMING) -> int:
    return find_short_prompt_tokens(timing, timing, transfer_ms, 0.01, 16, 16_000, tpot_ms)


def test_the_pass_that_the_prompt_shares_just_keeps_the_tpot_target() -> None:
    tokens = find(60.0)
    assert tokens > 0
    assert TIMING.predict_iteration_ms([PromptChunk(0, tokens)], 16, 16_000) <= 60.0
    assert TIMING.predict_iteration_ms([PromptChunk(0, tokens + 1)], 16, 16_000) > 60.0


def test_a_tighter_target_splits_shorter_prompts() -> None:
    assert find(30.0) < find(60.0)


def test_a_target_that_decoding_alone_misses_splits_everything() -> None:
    assert find(12.0) == 0


@pytest.mark.parametrize("slow", [1.0, 3.0])
def test_slow_prompts_on_the_decode_side_are_split(slow: float) -> None:
    decode = replace(TIMING, prompt_ms=(10.0, 10.0 + 0.1 * slow))
    found = find_short_prompt_tokens(TIMING, decode, 0.0, 0.0, 16, 16_000, 1e6)
    assert (found == 1 << 15) == (slow == 1.0)
