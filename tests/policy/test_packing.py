"""Aladdin's constraints and its measure of fullness."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.perf.aladdin import Coefficients
from cleave.policy.admission import find_peak
from cleave.policy.packing import (
    find_norm,
    find_peak_after,
    find_saved_ms,
    find_spare_context,
    find_spare_prompt,
    weigh_context,
)

FIT = Coefficients(k1=0.2, c1=10.0, k2=0.001, c2=0.5, c3=20.0)


@given(st.integers(1, 200), st.integers(0, 50_000), st.floats(21, 500))
def test_a_request_that_fits_keeps_the_pass_within_the_tpot_target(
    batch: int, context: int, tpot_ms: float
) -> None:
    spare = find_spare_context(batch, context, FIT.k2, FIT.c2, FIT.c3, tpot_ms, 1.0)
    assert FIT.decode_ms(batch + 1, context + spare) == pytest.approx(tpot_ms)
    assert spare + context == pytest.approx(FIT.most_context_tokens(batch + 1, tpot_ms))


def test_a_strictness_below_one_leaves_room_for_wrong_predictions() -> None:
    spare = [find_spare_context(9, 0, FIT.k2, FIT.c2, FIT.c3, 50.0, theta) for theta in (0.5, 1.0)]
    assert spare == pytest.approx([12_500, 25_000])


def test_waiting_prompts_together_keep_the_ttft_target() -> None:
    spare = find_spare_prompt(1_000.0, FIT.k1, FIT.c1, 410.0)
    assert spare == pytest.approx(1_000)
    assert FIT.prefill_ms(1_000 + spare) == pytest.approx(410)


def test_a_request_ahead_of_its_target_can_spare_what_it_has_saved() -> None:
    assert find_saved_ms(10, 300.0, 50.0, 1.0) == pytest.approx(200)
    assert find_saved_ms(10, 600.0, 50.0, 1.0) < 0


def test_an_output_counts_between_its_first_and_its_last_token() -> None:
    assert [weigh_context(100, 40, gamma) for gamma in (0.0, 0.5, 1.0)] == [100, 120, 140]


def test_fullness_grows_with_batch_and_with_context() -> None:
    base = find_norm(10, 10_000, FIT.k2, FIT.c2)
    assert find_norm(20, 10_000, FIT.k2, FIT.c2) > base
    assert find_norm(10, 30_000, FIT.k2, FIT.c2) > base
    assert find_norm(0, 0, FIT.k2, FIT.c2) == 0


def test_arrays_give_what_numbers_give() -> None:
    batch, context = np.array([1.0, 5.0, 9.0]), np.array([100.0, 2_000.0, 300.0])
    spare = find_spare_context(batch, context, FIT.k2, FIT.c2, FIT.c3, 50.0, 0.9)
    norm = find_norm(batch, context, FIT.k2, FIT.c2)
    for at in range(3):
        one = float(batch[at]), float(context[at])
        assert spare[at] == pytest.approx(
            find_spare_context(*one, FIT.k2, FIT.c2, FIT.c3, 50.0, 0.9)
        )
        assert norm[at] == pytest.approx(find_norm(*one, FIT.k2, FIT.c2))


@given(st.lists(st.tuples(st.integers(0, 4_000), st.integers(1, 4_000)), min_size=1, max_size=30))
def test_both_ways_to_find_the_peak_agree(requests: list[tuple[int, int]]) -> None:
    held, left = np.array(requests).T
    peak = find_peak_after(held.astype(float), left.astype(float))
    assert peak == find_peak(held.copy(), left.copy())
