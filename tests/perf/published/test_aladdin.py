"""Aladdin's Eq. 2 and 3, learnt from samples."""

import math
import random
from dataclasses import astuple

import pytest

from cleave.perf.published.aladdin import (
    Coefficients,
    IterationTimeModel,
    OnlineFit,
    TooFewSamplesError,
)

TRUTH = Coefficients(k1=0.1, c1=18.0, k2=0.0006, c2=0.04, c3=20.0)


def learn(times: IterationTimeModel, truth: Coefficients, passes: int, noise: float = 0.0) -> None:
    draw = random.Random(3)
    for _ in range(passes):
        tokens, batch = draw.randrange(10, 4000), draw.randrange(1, 100)
        context = batch * draw.randrange(10, 2000)
        times.add_prefill(tokens, truth.predict_prefill_ms(tokens) * (1 + draw.gauss(0, noise)))
        times.add_decode(
            batch, context, truth.predict_decode_ms(batch, context) * (1 + draw.gauss(0, noise))
        )


def test_the_coefficients_are_found() -> None:
    times = IterationTimeModel()
    learn(times, TRUTH, 100)
    found = times.solve()
    for name in ("k1", "c1", "k2", "c2", "c3"):
        assert getattr(found, name) == pytest.approx(getattr(TRUTH, name), rel=1e-4)


def test_the_error_is_about_the_noise() -> None:
    times = IterationTimeModel()
    learn(times, TRUTH, 400, noise=0.05)
    for fit in (times.prefill, times.decode):
        assert fit.error == pytest.approx(0.05 * math.sqrt(2 / math.pi), abs=0.02)


def assess_bias(times: IterationTimeModel) -> float:
    """Predicted relative to true time, less 1: the mean over iterations of both phases."""
    found = times.solve()
    ratios = [
        found.predict_prefill_ms(n) / TRUTH.predict_prefill_ms(n) for n in (200, 1_000, 3_000)
    ] + [
        found.predict_decode_ms(b, 1_000 * b) / TRUTH.predict_decode_ms(b, 1_000 * b)
        for b in (5, 30, 90)
    ]
    return sum(ratios) / len(ratios) - 1


def test_times_that_vary_are_not_learned_too_short() -> None:
    times = IterationTimeModel()
    learn(times, TRUTH, 4_000, noise=0.2)
    assert assess_bias(times) == pytest.approx(0, abs=0.02), "relative to values: -8 %"


def test_stalls_count_little() -> None:
    times = IterationTimeModel()
    for _ in range(40):
        learn(times, TRUTH, 99, noise=0.05)
        times.add_prefill(1_000, 10 * TRUTH.predict_prefill_ms(1_000))
        times.add_decode(30, 30_000, 10 * TRUTH.predict_decode_ms(30, 30_000))
    assert assess_bias(times) == pytest.approx(0, abs=0.04), "as much as others: +9 %"


@pytest.mark.parametrize("ratio", [0.1, 0.001])
def test_a_sample_that_is_far_too_short_does_not_spoil_the_first_fit(ratio: float) -> None:
    times = IterationTimeModel()
    learn(times, TRUTH, 3, noise=0.05)
    times.add_prefill(1_000, ratio * TRUTH.predict_prefill_ms(1_000))
    times.add_decode(30, 30_000, ratio * TRUTH.predict_decode_ms(30, 30_000))
    learn(times, TRUTH, 60, noise=0.05)
    assert assess_bias(times) == pytest.approx(0, abs=0.15), "relative to values: -70 % and more"


def test_a_machine_that_became_faster_is_followed() -> None:
    times = IterationTimeModel()
    slower = Coefficients(*(5 * each for each in astuple(TRUTH)))
    learn(times, slower, 500, noise=0.05)
    learn(times, TRUTH, 500, noise=0.05)
    assert assess_bias(times) == pytest.approx(0, abs=0.15)


def test_a_machine_that_changes_is_followed() -> None:
    times = IterationTimeModel()
    learn(times, TRUTH, 500)
    slower = Coefficients(k1=0.2, c1=30.0, k2=0.001, c2=0.1, c3=40.0)
    learn(times, slower, 8000)
    found = times.solve()
    assert found.predict_prefill_ms(1000) == pytest.approx(
        slower.predict_prefill_ms(1000), rel=0.01
    )
    assert found.predict_decode_ms(32, 20_000) == pytest.approx(
        slower.predict_decode_ms(32, 20_000), rel=0.01
    )
    for fit in (times.prefill, times.decode):
        assert fit.error == pytest.approx(0, abs=0.01)


def test_the_timing_has_the_same_lines() -> None:
    timing = TRUTH.to_timing()
    assert timing.predict_prefill_ms([300, 200]) == pytest.approx(TRUTH.predict_prefill_ms(500))
    assert timing.predict_decode_ms(17, 5000) == pytest.approx(TRUTH.predict_decode_ms(17, 5000))


def test_few_samples_are_refused_with_the_phase() -> None:
    times = IterationTimeModel()
    learn(times, TRUTH, 7)
    with pytest.raises(TooFewSamplesError, match="prefill: 7 samples are too few for a fit; 8"):
        times.solve()


def test_samples_of_one_length_determine_nothing() -> None:
    fit = OnlineFit(2)
    for _ in range(100):
        fit.add((512.0, 1.0), 70.0)
    with pytest.raises(TooFewSamplesError, match="do not determine"):
        fit.solve()
    assert fit.error is None


def test_single_requests_teach_nothing_about_batches() -> None:
    times = IterationTimeModel()
    times.add_decode(1, 100, 20.0)
    assert times.decode.num_samples == 0


@pytest.mark.parametrize("ms", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_duration_is_refused(ms: float) -> None:
    with pytest.raises(ValueError, match="is invalid"):
        IterationTimeModel().add_prefill(10, ms)
