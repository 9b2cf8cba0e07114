"""Curves through few points."""

import itertools
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.perf.profile import curve

VALUES = st.lists(st.floats(0, 1e6), min_size=2, max_size=30)


def test_lines_are_read_between_points_and_continued_on_both_sides() -> None:
    points = [(1, 10.0), (3, 20.0), (4, 40.0)]
    assert [curve.interpolate(points, at) for at in (0, 1, 2, 3, 3.5, 6)] == [5, 10, 15, 20, 30, 80]


def test_a_table_goes_on_with_the_mean_slope_of_the_upper_half() -> None:
    table = curve.tabulate([(0, 0.0), (10, 10.0), (20, 30.0), (30, 20.0)], 10.0)
    assert table == (0.0, 10.0, 30.0, 20.0, 25.0)


def test_a_table_whose_last_point_lies_between_steps_ends_beyond_it() -> None:
    table = curve.tabulate([(0, 0.0), (15, 15.0)], 10.0)
    assert table == (0.0, 10.0, 20.0, 30.0)


def test_a_table_is_never_below_zero() -> None:
    assert min(curve.tabulate([(10, 1.0), (20, 90.0)], 5.0)) == 0.0


def test_the_step_meets_every_place_or_keeps_the_table_small() -> None:
    assert curve.find_step([128, 384, 1024]) == 128
    assert curve.find_step([1, 40_960]) == 20


@given(VALUES)
def test_the_non_decreasing_fit_never_falls_and_keeps_the_sum(values: list[float]) -> None:
    fitted = [value for _, value in curve.fit_non_decreasing(list(enumerate(values)))]
    assert all(a <= b + 1e-9 * b for a, b in pairwise(fitted))
    assert sum(fitted) == pytest.approx(sum(values))


@given(st.lists(st.floats(0.01, 1e3), min_size=3, max_size=3))
def test_least_squares_recovers_the_coefficients(expected: list[float]) -> None:
    rows = [[1.0, n, n * n] for n in (100.0, 500.0, 1000.0, 4000.0)]
    values = [sum(a * b for a, b in zip(row, expected, strict=True)) for row in rows]
    found = curve.solve_least_squares(rows, values)
    fitted = [sum(a * b for a, b in zip(row, found, strict=True)) for row in rows]
    assert fitted == pytest.approx(values, rel=1e-6)


def test_a_coefficient_that_would_be_negative_is_left_out() -> None:
    rows = [[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]
    assert curve.solve_least_squares(rows, [3.0, 2.0, 1.0]) == pytest.approx((2.0, 0.0))


@pytest.mark.parametrize("rows", [[[1.0, 5.0]] * 4, [[0.0, 1.0], [0.0, 2.0]]])
def test_rows_that_determine_nothing_are_refused(rows: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="do not determine"):
        curve.solve_least_squares(rows, [1.0] * len(rows))


def test_the_mean_error_is_a_share_of_what_was_measured() -> None:
    assert curve.compute_mean_error([(11.0, 10.0), (8.0, 10.0)]) == pytest.approx(0.15)
    assert curve.compute_mean_error([]) is None


@given(
    steps=st.lists(st.tuples(st.integers(1, 50), st.floats(-10, 10)), min_size=2, max_size=8),
    positions=st.lists(st.floats(-100, 600), max_size=20),
)
def test_one_pass_equals_single_positions_bit_by_bit(
    steps: list[tuple[int, float]], positions: list[float]
) -> None:
    xs = itertools.accumulate(step for step, _ in steps)
    points = [(float(x), value) for x, (_, value) in zip(xs, steps, strict=True)]
    ascending = sorted([*positions, *(x for x, _ in points)])
    single = [curve.interpolate(points, at) for at in ascending]
    assert curve.interpolate_all(points, ascending) == single
