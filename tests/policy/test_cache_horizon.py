"""From the age of an engine's oldest block to the clock that a router has of its cache."""

from cleave.policy.cache_horizon import (
    HISTORY_SIZE,
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


def record(history: list[float], count: int, start: int = 1, wait_ms: float = 0.0) -> None:
    """At each 1,000 ms the clock has moved by one step."""
    for number in range(start, start + count):
        record_clock(history, 1_000.0 * number + wait_ms, STEP * number, CAPACITY)


def test_the_horizon_is_the_clock_at_the_use_less_a_slack() -> None:
    history = start_history(0.0, 0.0)
    record(history, 20)
    assert find_horizon(history, 15_000.0 + SLACK_MS) == 15 * STEP
    assert find_horizon(history, 15_999.0 + SLACK_MS) == 15 * STEP
    assert find_horizon(history, 1e9) == 20 * STEP


def test_what_waited_when_it_was_stamped_was_used_later() -> None:
    history = start_history(0.0, 0.0)
    record(history, 10, wait_ms=5_000.0)
    # Nothing waits any more when the report comes.
    record(history, 10, start=11)
    assert find_horizon(history, 9_000.0 + SLACK_MS) == 4 * STEP
    assert find_horizon(history, 16_000.0 + SLACK_MS) == 16 * STEP


def test_nothing_is_known_from_before_the_first_sample() -> None:
    for clock in (0.0, 700.0):
        history = start_history(50_000.0, clock)
        record(history, 10, 51)
        assert find_horizon(history, 50_500.0) == UNKNOWN
        assert find_horizon(history, 50_000.0 + SLACK_MS) == clock


def test_the_history_is_bounded_and_reaches_back_as_far_as_a_window_may() -> None:
    history = start_history(0.0, 0.0)
    record(history, 1_000)
    assert len(history) == HISTORY_SIZE
    oldest_ms = 1_000.0 * (1_001 - NUM_SAMPLES)
    oldest = find_horizon(history, oldest_ms + SLACK_MS)
    assert oldest == STEP * (1_001 - NUM_SAMPLES)
    assert 1_000 * STEP - oldest > CAPACITY
    assert find_horizon(history, oldest_ms) == UNKNOWN


def test_a_share_that_grows_leaves_what_the_history_does_not_reach_unknown() -> None:
    history = start_history(0.0, 0.0)
    for number in range(1, 1_001):
        record_clock(history, 1_000.0 * number, STEP / 4 * number, CAPACITY / 4)
    assert find_horizon(history, 900_000.0) == UNKNOWN


def test_a_clock_that_has_hardly_moved_adds_no_sample() -> None:
    history = start_history(0.0, 0.0)
    for number in range(10_000):
        record_clock(history, float(number), number * STEP / 1_000, CAPACITY)
    # A window may be too long by that much, not too short.
    true = (9_000.0 - SLACK_MS) * STEP / 1_000
    assert true - STEP <= find_horizon(history, 9_000.0) <= true


def test_a_window_is_what_was_written_since_the_horizon_and_never_more_than_the_kv() -> None:
    assert measure_window(5_000.0, 4_000.0, CAPACITY) == 1_001.0
    assert measure_window(5_000.0, 5_000.0, CAPACITY) == 1.0, "stamped at this clock"
    assert measure_window(50_000.0, 4_000.0, CAPACITY) == CAPACITY
    assert measure_window(5_000.0, UNKNOWN, CAPACITY) == CAPACITY
