"""What an engine knows of its iterations after it has seen some."""

import pytest

from cleave_worker.scheduling.iteration_times import IterationTimes


def observe(times: IterationTimes, iterations: int, start_s: float = 0.0) -> float:
    """Decode iterations of 20 ms and 1 ms per 1,000 tokens held, every tenth with a prompt."""
    now = start_s
    for number in range(iterations):
        held = 1_000 * (number % 30)
        prompt = 100 * (number % 7 + 1) if number % 10 == 0 else 0
        ms = 0.1 * prompt + 5.0 if prompt else 20.0 + held / 1_000
        times.record(now, now + ms / 1000, prompt, held)
        now += ms / 1000
    return now


def test_nothing_is_known_of_too_few_iterations() -> None:
    times = IterationTimes()
    observe(times, 7)
    assert times.predict_decode_ms(5_000) == 0.0
    assert times.predict_prompt_ms(500, 2_048) == 0.0


def test_both_kinds_of_iterations_are_lines() -> None:
    times = IterationTimes()
    observe(times, 1_000)
    assert times.predict_decode_ms(50_000) == pytest.approx(70.0, rel=0.01)
    assert times.predict_prompt_ms(400, 2_048) == pytest.approx(45.0, rel=0.01)
    # Two iterations and a half.
    assert times.predict_prompt_ms(1_000, 400) == pytest.approx(112.5, rel=0.01)


def test_an_iteration_that_was_scheduled_ahead_takes_from_the_end_of_the_one_before() -> None:
    times = IterationTimes()
    for number in range(100):
        # Scheduled when the one before began, 10 ms before that ended.
        times.record(0.01 * (number - 1), 0.01 * (number + 1), 0, 1_000)
    assert times.predict_decode_ms(1_000) == pytest.approx(10.0, rel=0.05)


def test_the_time_between_iterations_is_not_theirs() -> None:
    times = IterationTimes()
    for number in range(100):
        times.record(number, number + 0.01, 0, 1_000)
    assert times.predict_decode_ms(1_000) == pytest.approx(10.0)


def test_equal_iterations_say_that_more_tokens_take_no_longer() -> None:
    times = IterationTimes()
    for number in range(100):
        times.record(number, number + 0.01 + 0.0001 * (number % 2), 0, 300)
    assert times.predict_decode_ms(4_000) == pytest.approx(10.0, rel=0.02)


def test_a_request_takes_part_in_one_of_the_iterations_in_flight() -> None:
    times = IterationTimes(stages=4)
    for number in range(100):
        times.record(0.01 * number - 0.03, 0.01 * (number + 1), 0, 1_000)
    assert times.predict_decode_ms(1_000) == pytest.approx(40.0, rel=0.05)
