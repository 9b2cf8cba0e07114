"""Aladdin's constraints and its measure of fullness."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.perf.published.aladdin import Coefficients
from cleave.policy.admission import find_peak, find_sorted_peak
from cleave.policy.best_fit import (
    BestFitModel,
    compute_capacity_norm,
    compute_context_weight,
    compute_saved_ms,
    compute_spare_context,
    compute_spare_prompt,
    count_context,
    exclude_prompts,
    find_best_fit,
    keeps_running,
    measure_fullness,
)
from cleave.policy.output_length import guess_progress

FIT = Coefficients(k1=0.2, c1=10.0, k2=0.001, c2=0.5, c3=20.0)


@given(st.integers(1, 200), st.integers(0, 50_000), st.floats(21, 500))
def test_a_request_that_fits_keeps_the_pass_within_the_tpot_target(
    batch: int, context: int, tpot_ms: float
) -> None:
    spare = compute_spare_context(batch, context, FIT.k2, FIT.c2, FIT.c3, tpot_ms, 1.0)
    assert FIT.predict_decode_ms(batch + 1, context + spare) == pytest.approx(tpot_ms)


def test_a_strictness_below_one_leaves_room_for_wrong_predictions() -> None:
    spare = [
        compute_spare_context(9, 0, FIT.k2, FIT.c2, FIT.c3, 50.0, theta) for theta in (0.5, 1.0)
    ]
    assert spare == pytest.approx([12_500, 25_000])


def test_waiting_prompts_together_keep_the_ttft_target() -> None:
    spare = compute_spare_prompt(1_000.0, FIT.k1, FIT.c1, 410.0)
    assert spare == pytest.approx(1_000)
    assert FIT.predict_prefill_ms(1_000 + spare) == pytest.approx(410)


def test_a_request_ahead_of_its_target_can_spare_what_it_has_saved() -> None:
    assert compute_saved_ms(10, 300.0, 50.0, 1.0) == pytest.approx(200)
    assert compute_saved_ms(10, 600.0, 50.0, 1.0) < 0


def test_time_of_prompts_is_no_progress_of_what_decodes() -> None:
    own_ms = exclude_prompts(500.0, 1_000, FIT.k1)
    assert own_ms == pytest.approx(300)
    # 15 tokens in 500 ms are slower than the target of 30 ms; 25 would be faster.
    for own, is_ahead in ((own_ms, False), (500.0, True)):
        generated, _ = guess_progress(100, own, 20.0)
        assert (compute_saved_ms(generated, 500.0, 30.0, 1.0) > 0) is is_ahead


def test_prompts_of_its_own_iteration_take_no_progress_from_a_request() -> None:
    assert exclude_prompts(20.0, 1_500, FIT.k1) == 0


def test_an_output_counts_between_its_first_and_its_last_token() -> None:
    assert [compute_context_weight(100, 40, gamma) for gamma in (0.0, 0.5, 1.0)] == [100, 120, 140]


def test_fullness_grows_with_batch_and_with_context() -> None:
    base = compute_capacity_norm(10, 10_000, FIT.k2, FIT.c2)
    assert compute_capacity_norm(20, 10_000, FIT.k2, FIT.c2) > base
    assert compute_capacity_norm(10, 30_000, FIT.k2, FIT.c2) > base
    assert compute_capacity_norm(0, 0, FIT.k2, FIT.c2) == 0


def test_arrays_give_what_numbers_give() -> None:
    batch, context = np.array([1.0, 5.0, 9.0]), np.array([100.0, 2_000.0, 300.0])
    spare = compute_spare_context(batch, context, FIT.k2, FIT.c2, FIT.c3, 50.0, 0.9)
    norm = compute_capacity_norm(batch, context, FIT.k2, FIT.c2)
    for at in range(3):
        one = float(batch[at]), float(context[at])
        assert spare[at] == pytest.approx(
            compute_spare_context(*one, FIT.k2, FIT.c2, FIT.c3, 50.0, 0.9)
        )
        assert norm[at] == pytest.approx(compute_capacity_norm(*one, FIT.k2, FIT.c2))


@given(st.lists(st.tuples(st.integers(0, 4_000), st.integers(1, 4_000)), min_size=1, max_size=30))
def test_the_peak_of_sorted_requests_is_that_of_unsorted_ones(
    requests: list[tuple[int, int]],
) -> None:
    resident, left = np.array(requests).T
    in_order = sorted(requests, key=lambda each: -each[1])
    peak = find_sorted_peak([resident for resident, _ in in_order], [left for _, left in in_order])
    assert peak == find_peak(resident.copy(), left.copy())


PACKING = BestFitModel(FIT, ttft_ms=210.0, tpot_ms=30.0)


def measure(scores, batch, context, pending, prefills: bool = False):
    arrays = (np.array(each, float) for each in (scores, batch, context, pending))
    return measure_fullness(*arrays, 500, 1_000, prefills, FIT, PACKING)


def test_instances_without_room_in_a_pass_or_closed_are_not_full_but_unfit() -> None:
    fullness = measure([1, 1, np.inf, 1e9], [1, 100, 1, 1], [100] * 4, [0] * 4)
    assert (fullness >= 0).tolist() == [True, False, False, False]


def test_a_prompt_is_computed_only_where_it_keeps_the_ttft_target() -> None:
    waits = [1, 1], [1, 1], [100, 100], [0, 600]
    assert (measure(*waits) >= 0).tolist() == [True, True]
    assert (measure(*waits, prefills=True) >= 0).tolist() == [True, False]


def test_the_fullest_that_keeps_what_runs_is_the_best_fit() -> None:
    def find(*open_instances: int) -> int:
        fullness = np.array([1.0, 3.0, -1.0, 2.0, 3.0])
        return find_best_fit(fullness, lambda slot, *_: slot in open_instances, None, False)

    assert [find(0, 1, 2, 3, 4), find(0, 3), find(0), find(2), find()] == [1, 3, 0, -1, -1]


def test_requests_that_outrun_their_prediction_count_with_what_they_hold() -> None:
    weight = compute_context_weight(100, 40, 0.5)
    assert [count_context(weight, held) for held in (110, 140, 300)] == [120, 140, 300]

    def keeps(context: float) -> bool:
        amounts = [10.0, 50.0], [40.0, 20.0], 9, context, 500.0
        return keeps_running(*amounts, 1e9, 0.0, 100, False, 1e6, FIT, PACKING)

    room = compute_spare_context(9, 0, FIT.k2, FIT.c2, FIT.c3, PACKING.tpot_ms, PACKING.theta)
    assert (keeps(room - 501), keeps(room - 499)) == (True, False)


def test_a_request_stays_away_where_kv_runs_out_or_what_decodes_would_wait_too_long() -> None:
    def keeps(capacity: float, saved_ms: float = 1e9, prefills: bool = True) -> bool:
        rest = 0.0, 100, prefills, capacity, FIT, PACKING
        return keeps_running([10.0, 50.0], [40.0, 20.0], 1, 50.0, 30.0, saved_ms, *rest)

    # Both hold 100 together when the first ends, of which 0.9 are used.
    assert (keeps(111.2), keeps(111.0)) == (True, False)
    assert (keeps(1e6, 30.1), keeps(1e6, 29.9)) == (True, False)
    assert keeps(1e6, 29.9, prefills=False)
