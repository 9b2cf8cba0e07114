"""TetriInfer's classes of requests, and that its gains have the paper's signs here."""

import numpy as np
import pytest


@pytest.fixture
def tetriinfer(module):
    return module("tetriinfer")


def test_requests_of_a_class_are_heavy_and_light_as_it_says(tetriinfer) -> None:
    for name, (prompt, output) in tetriinfer.CLASSES.items():
        trace = tetriinfer.draw(name, 0)
        assert len(trace) == tetriinfer.REQUESTS
        assert (trace.prompt_tokens + trace.output_tokens <= tetriinfer.MAX_TOKENS).all()
        for is_heavy, values, limit in (
            (prompt, trace.prompt_tokens, tetriinfer.HEAVY_PROMPT),
            (output, trace.output_tokens, tetriinfer.HEAVY_OUTPUT),
        ):
            assert is_heavy is None or ((values > limit) == is_heavy).all()


def test_ranges_of_outputs_are_as_accurate_as_the_papers_predictor(tetriinfer) -> None:
    outputs = np.arange(1, 4_001)
    predicted = tetriinfer.predict(outputs, 0)
    low = np.maximum(outputs // tetriinfer.RANGE * tetriinfer.RANGE, 1)
    assert np.mean(predicted == low) == pytest.approx(tetriinfer.ACCURACY, abs=0.02)
    assert (predicted % tetriinfer.RANGE == 0)[predicted > 1].all()


def test_gains_over_the_papers_baseline_have_its_signs(module, tetriinfer) -> None:
    gains = module("facts").CLASS_GAINS
    timing = tetriinfer.build_timings()["A100, measured"]
    rows = [row for row in tetriinfer.compare_on("A100", timing, 1) if "16" in row.baseline]
    assert [row.name for row in rows] == list(gains)
    for row in rows:
        paper = gains[row.name]
        assert row.ttft < 0
        assert row.jct < 0
        if abs(paper.used) > 0.1:
            assert np.sign(row.used) == np.sign(paper.used), row


def test_against_a_larger_batch_the_pair_saves_no_time_in_use(tetriinfer) -> None:
    timing = tetriinfer.build_timings()["A100, measured"]
    rows = [row for row in tetriinfer.compare_on("A100", timing, 1) if "256" in row.baseline]
    assert all(row.used > -0.05 for row in rows)
