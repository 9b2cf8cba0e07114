"""Who is doubted and who counts as hung; healthy instances are neither."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.upstream.circuit_breaker import (
    FAILURE_THRESHOLD,
    MAX_SUSPECT_S,
    MIN_STALL_TIMEOUT_S,
    MIN_SUSPECT_S,
    CircuitBreaker,
    StallDetector,
)


def test_an_instance_is_doubted_after_failures_in_a_row_and_tried_again_later() -> None:
    breaker = CircuitBreaker()
    for _ in range(FAILURE_THRESHOLD - 1):
        breaker.record_failure("a", 10.0)
    assert not breaker.list_suspects(10.0)
    breaker.record_failure("a", 10.0)
    assert breaker.list_suspects(10.0) == {"a"}
    assert not breaker.list_suspects(10.0 + MIN_SUSPECT_S)


def test_one_success_clears_an_instance() -> None:
    breaker = CircuitBreaker()
    for _ in range(2 * FAILURE_THRESHOLD):
        breaker.record_failure("a", 0.0)
    breaker.record_success("a")
    assert not breaker.failure_states
    breaker.record_failure("a", 0.0)
    assert not breaker.list_suspects(0.0)


def test_doubt_lasts_longer_each_time_but_never_long() -> None:
    breaker, ends = CircuitBreaker(), []
    for number in range(12):
        now = 100.0 * number
        breaker.record_failure("a", now, immediately=True)
        ends.append(next(s for s in range(1, 100) if not breaker.list_suspects(now + s)))
    assert ends[:4] == [1, 2, 4, 8]
    assert max(ends) == MAX_SUSPECT_S


def test_what_was_long_ago_is_forgotten() -> None:
    breaker = CircuitBreaker()
    breaker.record_failure("a", 0.0)
    breaker.expire(MAX_SUSPECT_S - 1)
    assert breaker.failure_states
    breaker.expire(MAX_SUSPECT_S + 1)
    assert not breaker.failure_states


@given(st.lists(st.floats(0.05, 5.0), min_size=1, max_size=50))
def test_an_engine_that_moves_as_it_always_did_never_counts_as_hung(gaps: list[float]) -> None:
    detector, now = StallDetector(0.0), 0.0
    for gap in gaps:
        now += gap
        assert now - detector.last_progress_at <= detector.compute_stall_timeout_s()
        detector.record_progress(now)


def test_patience_follows_the_pauses_an_engine_makes() -> None:
    quick, slow = StallDetector(0.0), StallDetector(0.0)
    for step in range(1, 5_000):
        quick.record_progress(step * 0.2)
        slow.record_progress(step * 2.0)
    assert quick.compute_stall_timeout_s() == MIN_STALL_TIMEOUT_S
    assert slow.compute_stall_timeout_s() >= 16.0


def test_idle_time_is_no_pause() -> None:
    detector = StallDetector(0.0)
    detector.last_progress_at = 1_000.0
    detector.record_progress(1_000.2)
    assert detector.compute_stall_timeout_s() < 60


def test_a_pause_of_the_gateway_itself_is_no_pause_of_an_engine() -> None:
    detector = StallDetector(100.0)
    detector.record_progress(100.2)
    before = detector.compute_stall_timeout_s()
    detector.discount_pause(5.0, 105.4)
    assert 105.4 - detector.last_progress_at == pytest.approx(0.2)
    detector.record_progress(105.5)
    assert detector.compute_stall_timeout_s() <= before
    detector.discount_pause(5.0, 106.0)
    assert detector.last_progress_at == 106.0
