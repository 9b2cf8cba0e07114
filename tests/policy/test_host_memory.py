import math

import pytest

from cleave.policy.host_memory import estimate_load_token_ms, measure_reach


def test_the_larger_of_both_caches_counts_where_all_is_copied() -> None:
    assert measure_reach(100.0, 400.0, 1_000.0, 1_000.0) == 400.0
    assert measure_reach(400.0, 100.0, 1_000.0, 1_000.0) == 400.0


def test_host_memory_lasts_longer_where_less_is_copied_than_written() -> None:
    assert measure_reach(100.0, 400.0, 1_000.0, 250.0) == 1_600.0
    assert measure_reach(100.0, 10.0, 1_000.0, 250.0) == 100.0


@pytest.mark.parametrize("stored", [0.0, -5.0])
def test_before_anything_is_copied_both_age_alike(stored: float) -> None:
    assert measure_reach(100.0, 400.0, 0.0, stored) == 400.0


def test_an_engine_counts_by_its_own_rate_once_it_has_copied_much() -> None:
    assert estimate_load_token_ms(1_000.0, 500.0, 0.01) == 0.01
    assert estimate_load_token_ms(100_000.0, 500.0, 0.01) == 0.005
    assert estimate_load_token_ms(100_000.0, 0.0, 0.01) == 0.01, "no times reported"


@pytest.mark.parametrize("wrong", [math.nan, -1.0])
def test_a_rate_that_cannot_be_counts_as_not_known(wrong: float) -> None:
    assert estimate_load_token_ms(0.0, 0.0, wrong) == 0.0
    assert estimate_load_token_ms(100_000.0, wrong, 0.01) == 0.01
