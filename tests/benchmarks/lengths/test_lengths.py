"""What the benchmark of lengths compares."""

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A service of two applications by turns, each with prompts and answers of its own."""
    rng = np.random.default_rng(2)
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for number in range(2_000):
        prompt, output = ((600, 60), (900, 700))[number % 2]
        lines.append(f"{number},{prompt},{output + rng.integers(0, 40)}")
    (tmp_path / "AzureLLMInferenceTrace_2023_conv.csv").write_text("\n".join(lines))
    return tmp_path


def test_only_requests_outside_the_training_set_are_predicted(module, data) -> None:
    predictions = module("predictions").predict_outputs(data, "conversation", 0.0)
    assert (
        len(predictions.answers)
        == len(predictions.mean)
        == len(predictions.tree)
        == len(predictions.low)
        == 600
    )
    assert np.abs(predictions.tree - predictions.answers.output_tokens).max() < 40
    assert np.abs(predictions.mean - predictions.answers.output_tokens).min() > 200
    assert set(predictions.low.tolist()) == {1, 600}
    scores = predictions.score()
    assert scores["classifier"].mean_absolute_error < 40
    assert scores["classifier"].accuracy[1] > scores["mean by prompt length"].accuracy[1]


def test_admission_by_each_way_serves_the_same_requests(module, data) -> None:
    predictions = module("predictions").predict_outputs(data, "conversation", 0.0)
    rows = list(module("effects").admissions(predictions, quick=True))
    greedy = [row for row in rows if row["admission"] == "GREEDY"]
    assert [row["gain"] for row in greedy] == [0]
    ways = {row["foretold_by"] for row in rows} - {"any"}
    assert ways == {"mean by prompt length", "classifier", "known", "likeliest range, low end"}
    known = {row["admission"]: row for row in rows if row["foretold_by"] == "known"}
    assert known["RESERVE_DYNAMIC"]["preemptions"] < greedy[0]["preemptions"]
