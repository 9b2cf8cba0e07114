"""From the age of an engine's oldest block to the clock that a router has of its cache."""

import pytest

from cleave.policy.cache_horizon import (
    MAX_RATIO,
    NUM_SAMPLES,
    UNKNOWN,
    find_horizon,
    measure_window,
    record_clock,
    start_history,
)

CAPACITY = 3_200.0
STEP = CAPACITY / 32
SLACK_MS = 1_000.0


def record(history: list[float], count: int, start: int = 1) -> None:
    """At each 1,000 ms the clock has moved by one step."""
    for number in range(start, start + count):
        record_clock(history, 1_000.0 * number, STEP * number, CAPACITY)


def test_the_horizon_is_the_clock_at_the_use_less_the_wait_and_a_slack() -> None:
    history = start_history(0.0, 0.0)
    record(history, 20)
    assert find_horizon(history, 15_000.0 + SLACK_MS, 0.0) == 15 * STEP
    assert find_horizon(history, 15_999.0 + SLACK_MS, 0.0) == 15 * STEP
    assert find_horizon(history, 15_000.0 + SLACK_MS, 5_000.0) == 10 * STEP
    assert find_horizon(history, 1e9, 0.0) == 20 * STEP


def test_what_was_stamped_since_the_start_of_a_boot_is_not_before_the_horizon() -> None:
    history = start_history(50_000.0, 0.0)
    assert find_horizon(history, 50_100.0, 0.0) == 0.0
    record(history, 10, 51)
    assert find_horizon(history, 50_500.0, 0.0) == 0.0


def test_nothing_is_known_from_before_a_process_that_came_later() -> None:
    history = start_history(50_000.0, 700.0)
    record(history, 10, 51)
    assert find_horizon(history, 50_500.0, 0.0) == UNKNOWN
    assert find_horizon(history, 50_000.0 + SLACK_MS, 0.0) == 700.0


def test_the_history_is_bounded_and_reaches_back_as_far_as_a_window_may() -> None:
    history = start_history(0.0, 0.0)
    record(history, 1_000)
    assert len(history) == 1 + 2 * NUM_SAMPLES
    oldest = find_horizon(history, 0.0, 0.0)
    assert oldest == STEP * (1_001 - NUM_SAMPLES)
    window = measure_window(1_000 * STEP, oldest, CAPACITY)
    assert window == pytest.approx(MAX_RATIO * CAPACITY, rel=0.02)


def test_a_clock_that_has_hardly_moved_adds_no_sample() -> None:
    history = start_history(0.0, 0.0)
    for number in range(10_000):
        record_clock(history, float(number), number * STEP / 1_000, CAPACITY)
    # A window may be too long by that much, not too short.
    true = (9_000.0 - SLACK_MS) * STEP / 1_000
    assert true - STEP <= find_horizon(history, 9_000.0, 0.0) <= true


def test_a_window_is_what_was_written_since_the_horizon() -> None:
    assert measure_window(5_000.0, 4_000.0, CAPACITY) == 1_001.0
    assert measure_window(5_000.0, 5_000.0, CAPACITY) == 1.0, "stamped at this clock"
    assert measure_window(50_000.0, 4_000.0, CAPACITY) == MAX_RATIO * CAPACITY
    assert measure_window(5_000.0, UNKNOWN, CAPACITY) == CAPACITY
