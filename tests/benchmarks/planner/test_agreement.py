import importlib
import math

import pytest


def test_both_targets_have_to_hold_and_what_never_ended_meets_none() -> None:
    agreement = importlib.import_module("agreement")
    latencies = ([10.0, 30.0, 10.0, math.nan], [5.0, 5.0, 9.0, 5.0])
    assert agreement.attainment(latencies, (20.0, 6.0)) == pytest.approx(0.25)


def test_the_largest_difference_is_that_of_a_single_request() -> None:
    agreement = importlib.import_module("agreement")
    found = agreement.agree(([10.0, 30.0], [5.0, 5.0]), ([10.0, 29.0], [5.0, 8.0]), (29.5, 6.0))
    assert found.largest_ms == pytest.approx(3.0)
    assert (found.ours, found.theirs) == (0.5, 0.5)
    assert found.points == 0.0


def test_a_spread_is_the_median_with_its_extremes() -> None:
    summary_statistics = importlib.import_module("summary_statistics")
    figure = summary_statistics.spread([1200.0, 1000.0, 5000.0])
    assert figure.format(0) == "1,200 (1,000-5,000)"
