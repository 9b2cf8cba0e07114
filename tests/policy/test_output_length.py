"""Output lengths, learned from responses, queried as by a router."""

import random

import pytest

from cleave.policy.output_length import ConditionalMean, estimate_remaining, guess_progress


def taught(*answers: tuple[int, int], first: float = 256) -> ConditionalMean:
    lengths = ConditionalMean(first)
    for prompt, output in answers:
        lengths.observe(prompt, output)
    return lengths


def test_before_any_answer_the_given_length_is_predicted() -> None:
    assert taught(first=300).predict(1_000) == 300


def test_a_limit_is_never_exceeded() -> None:
    lengths = taught((100, 500))
    assert lengths.predict(100, 50) == 50


def test_prompts_of_different_length_have_separate_means() -> None:
    lengths = taught(*[(100, 40), (5_000, 800)] * 200)
    assert lengths.predict(100) == pytest.approx(40, rel=0.5)
    assert lengths.predict(5_000) == pytest.approx(800, rel=0.1)


def test_a_class_that_nothing_is_known_of_gets_the_mean_of_all() -> None:
    assert taught(*[(100, 40)] * 50).predict(100_000) == pytest.approx(40)


def test_predictions_are_not_biased() -> None:
    rng = random.Random(5)
    lengths = ConditionalMean(256)
    error = total = 0.0
    for _ in range(8_000):
        prompt = int(rng.lognormvariate(6, 1)) + 1
        output = int(rng.expovariate(1 / 200)) + 1
        if _ > 2_000:
            error += lengths.predict(prompt) - output
            total += output
        lengths.observe(prompt, output)
    assert abs(error / total) < 0.05


def test_old_answers_fade() -> None:
    lengths = taught(*[(100, 40)] * 3_000, *[(100, 400)] * 12_000)
    assert lengths.predict(100) == pytest.approx(400, rel=0.02)


def test_a_request_beyond_its_prediction_is_predicted_to_need_as_much_again() -> None:
    assert estimate_remaining(100, 40) == 60
    assert estimate_remaining(100, 100) == 100
    assert estimate_remaining(100, 250) == 100


def test_progress_is_guessed_from_how_long_a_request_decodes() -> None:
    assert guess_progress(40, 200.0, 20.0) == (10, 30)
    assert guess_progress(40, 900.0, 20.0) == (45, 40), "it has outrun its prediction"
