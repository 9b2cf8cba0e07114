"""Passes put together from measured operators."""

from dataclasses import replace

import pytest

from cleave.perf.profile import operator_fit
from cleave.perf.profile.codec import InvalidProfileError
from cleave.perf.profile.profile import MixedAttentionPoint
from cleave.perf.timing import PromptChunk

from tests.support import measured_profiles

OPERATORS = measured_profiles.operators()


def rows_ms(rows: float, tensor: int) -> float:
    """Overhead and two layers with two operators and two all-reduces each."""
    reduces = 2 * (0.05 + rows * 200 / 1e6) if tensor > 1 else 0.0
    return 1.0 + 2 * (2 * (0.5 + rows / 100) / tensor + reduces)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_prompt_pass_is_the_sum_of_its_operators(tensor: int) -> None:
    timing = operator_fit.to_timing(OPERATORS, tensor)
    attention = 2 * 500**2 / tensor / 1e5
    expected = rows_ms(500, tensor) + 0.25 / tensor + attention
    assert timing.predict_prefill_ms([500]) == pytest.approx(expected, rel=1e-6)


def test_prompts_together_cost_one_of_their_equivalent_length() -> None:
    timing = operator_fit.to_timing(OPERATORS, 1)
    equivalent = (300**2 + 400**2) ** 0.5
    attention = 2 * equivalent**2 / 1e5
    assert timing.predict_prefill_ms([300, 400]) == pytest.approx(
        rows_ms(700, 1) + 0.25 + attention
    )


def test_a_later_chunk_attends_to_the_earlier_ones() -> None:
    timing = operator_fit.to_timing(OPERATORS, 1)
    chunk = timing.predict_iteration_ms([PromptChunk(300, 400)], 0, 0)
    assert chunk == pytest.approx(rows_ms(100, 1) + 0.25 + 2 * (400**2 - 300**2) / 1e5)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_decode_pass_has_a_row_of_logits_for_each_request(tensor: int) -> None:
    timing = operator_fit.to_timing(OPERATORS, tensor)
    attention = 2 * (0.1 + 900 / tensor / 1e4)
    expected = rows_ms(4, tensor) + 0.25 * 4 / tensor + attention
    assert timing.predict_decode_ms(4, 900) == pytest.approx(expected)


def measure_mixed(batch: int, factor: float) -> list[MixedAttentionPoint]:
    """A prompt chunk and decoding requests whose contexts take `factor` of the time alone."""
    return [
        MixedAttentionPoint(
            tokens=100, batch=batch, context_tokens=c, ms=0.1 + 0.1 + factor * c / 1e4
        )
        for c in (500, 2000)
    ]


def test_contexts_beside_a_prompt_take_as_long_as_measured() -> None:
    points = (*measure_mixed(2, 0.5), *measure_mixed(4, 3.0), *measure_mixed(8, 5.0))
    timing = operator_fit.to_timing(replace(OPERATORS, mixed_attention=points), 1)
    factors = [
        mixed / timing.decode_context_ms[min(n, len(timing.decode_context_ms) - 1)]
        for n, mixed in enumerate(timing.mixed_context_ms)
    ]
    # Never less than alone; between two batches a line.
    assert factors[1:] == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.5, 4.0, 4.5, 5.0])
    assert operator_fit.to_timing(OPERATORS, 1).mixed_context_ms == ()


def test_stages_pay_the_measured_send_between_them() -> None:
    timing = operator_fit.to_timing(OPERATORS, 1, stages=3)
    assert timing.stages == 3
    assert timing.hop_ms == pytest.approx(0.02)
    assert timing.hop_token_ms == pytest.approx(200 / 1e6)


def test_a_size_that_was_not_measured_is_refused_with_those_that_were() -> None:
    with pytest.raises(InvalidProfileError, match=r"tensorParallelSize 4 was not measured.* 1, 2"):
        operator_fit.to_timing(OPERATORS, 4)


def test_a_size_without_its_all_reduce_is_not_complete() -> None:
    assert operator_fit.list_tensor_parallel_sizes(measured_profiles.operators(all_reduce=())) == (
        1,
    )


def test_two_lengths_of_attention_give_a_square_alone() -> None:
    points = OPERATORS.prefill_attention[:2]
    fixed, per_token, square = operator_fit.fit_prompt_attention(points)
    assert (fixed, per_token) == (0.0, 0.0)
    assert square == pytest.approx(1e-5)
