"""Predictions of the time to the first token."""

import random

import pytest

from cleave.gateway.admission.deadline import predict_ttft_excess_s
from cleave.policy.decayed_line import MIN_SAMPLES, DecayedLine


def learn(slope: float, base: float, lengths: list[float], noise: float = 0.0) -> DecayedLine:
    model, chance = DecayedLine(), random.Random(1)
    for tokens in lengths:
        model.observe(tokens, base + slope * tokens + chance.uniform(-noise, noise))
    return model


LENGTHS = [float(100 * (1 + i % 40)) for i in range(200)]


def test_a_line_is_learnt() -> None:
    model = learn(0.0001, 0.05, LENGTHS, noise=0.01)
    assert model.predict(10_000) == pytest.approx(1.05, rel=0.05)
    assert model.compute_growth(0.5) == pytest.approx(5_000, rel=0.05)


def test_a_slower_fleet_is_noticed() -> None:
    model = learn(0.0001, 0.0, LENGTHS)
    for tokens in LENGTHS * 5:
        model.observe(tokens, 0.0003 * tokens)
    assert model.predict(1_000) == pytest.approx(0.3, rel=0.05)


def test_equal_lengths_give_a_slope_nevertheless() -> None:
    model = learn(0.0001, 0.0, [1_000.0] * 100)
    assert model.predict(2_000) == pytest.approx(0.2)


def test_with_few_samples_no_request_is_predicted_late() -> None:
    model = learn(1.0, 0.0, [10.0] * int(MIN_SAMPLES - 5))
    assert model.predict(1_000) is None
    assert model.compute_growth(1.0) is None
    assert predict_ttft_excess_s(model, 1e6, 1e6, 0.1) == 0


def test_a_request_is_late_by_what_is_before_it_only() -> None:
    model = learn(0.0001, 0.0, LENGTHS)
    assert predict_ttft_excess_s(model, 0, 3_000, 0.4) == 0
    assert predict_ttft_excess_s(model, 900, 3_000, 0.4) == 0
    assert predict_ttft_excess_s(model, 2_000, 3_000, 0.4) == pytest.approx(0.1, rel=0.05)
    assert predict_ttft_excess_s(model, 2_000, 9_000, 0.4) == 0, "it could never be on time"
