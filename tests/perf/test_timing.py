"""Passes as arithmetic."""

from dataclasses import replace

import pytest

from cleave.perf.timing import EngineTiming, PromptChunk, interpolate_table

TIMING = EngineTiming(
    prompt_step=10.0,
    prompt_ms=(5.0, 6.0, 9.0),
    prompt_square_ms=0.001,
    decode_ms=(4.0, 5.0, 7.0),
    decode_context_ms=(0.0, 0.01, 0.02),
    stages=3,
    hop_ms=0.5,
    hop_token_ms=0.1,
)


def test_lines_join_the_points_and_go_straight_on() -> None:
    assert [interpolate_table(10.0, TIMING.prompt_ms, at) for at in (0, 5, 10, 15, 20, 40)] == [
        5.0,
        5.5,
        6.0,
        7.5,
        9.0,
        15.0,
    ]


def test_a_pass_pays_its_hops_between_stages() -> None:
    assert TIMING.predict_prefill_ms([10]) == pytest.approx(6.0 + 0.1 + 2 * (0.5 + 0.1 * 10))
    assert TIMING.predict_decode_ms(2, 100) == pytest.approx(7.0 + 2.0 + 2 * (0.5 + 0.1 * 2))
    assert TIMING.predict_iteration_ms([], 0, 0) == 0


def test_a_batch_beyond_the_table_goes_straight_on() -> None:
    assert TIMING.predict_decode_ms(4, 100) == pytest.approx(11.0 + 2.0 + 2 * (0.5 + 0.1 * 4))


def test_a_mixed_pass_grows_the_decode_pass_by_the_prompts_rows() -> None:
    mixed = TIMING.predict_iteration_ms([PromptChunk(5, 15)], 2, 100)
    grown = interpolate_table(10.0, TIMING.prompt_ms, 12) - interpolate_table(
        10.0, TIMING.prompt_ms, 2
    )
    hops = 2 * (0.5 + 0.1 * 12)
    assert mixed == pytest.approx(9.0 + grown + 0.001 * (15**2 - 5**2) + hops)


def test_contexts_beside_a_prompt_have_a_price_of_their_own() -> None:
    dearer = replace(TIMING, mixed_context_ms=(0.0, 0.05))
    chunk = [PromptChunk(0, 10)]
    more_ms = dearer.predict_iteration_ms(chunk, 2, 100) - TIMING.predict_iteration_ms(
        chunk, 2, 100
    )
    assert more_ms == pytest.approx((0.05 - 0.02) * 100)
    assert dearer.predict_decode_ms(2, 100) == TIMING.predict_decode_ms(2, 100)


def test_a_mixed_pass_is_never_cheaper_than_its_prompts() -> None:
    light = EngineTiming(10.0, (50.0, 51.0), 0.0, (1.0, 2.0), (0.0,))
    assert light.predict_iteration_ms([PromptChunk(0, 10)], 1, 5) == light.predict_prefill_ms([10])
