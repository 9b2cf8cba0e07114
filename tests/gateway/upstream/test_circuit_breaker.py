"""Who is doubted and who counts as hung; healthy instances are neither."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.upstream.circuit_breaker import (
    FAILURES,
    FIRST_DOUBT_S,
    LAST_DOUBT_S,
    LEAST_PATIENCE_S,
    Breaker,
    Pulse,
)


def test_an_instance_is_doubted_after_failures_in_a_row_and_tried_again_later() -> None:
    breaker = Breaker()
    for _ in range(FAILURES - 1):
        breaker.fail("a", 10.0)
    assert not breaker.doubted(10.0)
    breaker.fail("a", 10.0)
    assert breaker.doubted(10.0) == {"a"}
    assert not breaker.doubted(10.0 + FIRST_DOUBT_S)


def test_one_success_clears_an_instance() -> None:
    breaker = Breaker()
    for _ in range(2 * FAILURES):
        breaker.fail("a", 0.0)
    breaker.succeed("a")
    assert not breaker.standing
    breaker.fail("a", 0.0)
    assert not breaker.doubted(0.0)


def test_doubt_lasts_longer_each_time_but_never_long() -> None:
    breaker, ends = Breaker(), []
    for number in range(12):
        now = 100.0 * number
        breaker.fail("a", now, surely=True)
        ends.append(next(s for s in range(1, 100) if not breaker.doubted(now + s)))
    assert ends[:4] == [1, 2, 4, 8]
    assert max(ends) == LAST_DOUBT_S


def test_what_was_long_ago_is_forgotten() -> None:
    breaker = Breaker()
    breaker.fail("a", 0.0)
    breaker.sweep(LAST_DOUBT_S - 1)
    assert breaker.standing
    breaker.sweep(LAST_DOUBT_S + 1)
    assert not breaker.standing


@given(st.lists(st.floats(0.05, 5.0), min_size=1, max_size=50))
def test_an_engine_that_moves_as_it_always_did_never_counts_as_hung(gaps: list[float]) -> None:
    pulse, now = Pulse(0.0), 0.0
    for gap in gaps:
        now += gap
        assert now - pulse.last <= pulse.patience_s()
        pulse.beat(now)


def test_patience_follows_the_pauses_an_engine_makes() -> None:
    quick, slow = Pulse(0.0), Pulse(0.0)
    for step in range(1, 5_000):
        quick.beat(step * 0.2)
        slow.beat(step * 2.0)
    assert quick.patience_s() == LEAST_PATIENCE_S
    assert slow.patience_s() >= 16.0


def test_idle_time_is_no_pause() -> None:
    pulse = Pulse(0.0)
    pulse.last = 1_000.0
    pulse.beat(1_000.2)
    assert pulse.patience_s() < 60


def test_a_pause_of_the_gateway_itself_is_no_pause_of_an_engine() -> None:
    pulse = Pulse(100.0)
    pulse.beat(100.2)
    before = pulse.patience_s()
    pulse.excuse(5.0, 105.4)
    assert 105.4 - pulse.last == pytest.approx(0.2)
    pulse.beat(105.5)
    assert pulse.patience_s() <= before
    pulse.excuse(5.0, 106.0)
    assert pulse.last == 106.0
