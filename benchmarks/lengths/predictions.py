"""Azure's two services with what each way to predict outputs says of their last requests."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from classifier import (
    GRANULARITIES,
    TRAINING_SHARE,
    Answers,
    Classifier,
    Score,
    compute_score,
    find_likeliest_ranges,
    get_ranges,
    predict_by_mean,
    read_answers,
)
from numpy.typing import NDArray

SERVICES = {"code": "code", "conversation": "conv"}
ERRORS = (0.0, 0.2)
"""Relative errors of prompt tokens: as counted, and as gateways estimate them from bytes."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """The test set and its predicted outputs; arrays of equal length."""

    answers: Answers
    constant: float
    """The mean output of the training set."""
    constant_ranges: list[int]
    mean: NDArray[np.float64]
    """By the mean by prompt length."""
    tree: NDArray[np.float64]
    """By the classifier: the mean of its leaf."""
    tree_ranges: NDArray[np.int64]

    @property
    def low(self) -> NDArray[np.int64]:
        """By the classifier: the low end of the likeliest range of 200, as TetriInfer does."""
        return np.maximum(self.tree_ranges[:, 1] * GRANULARITIES[1], 1)

    def score(self) -> dict[str, Score]:
        """How each way does."""
        outputs, num = self.answers.output_tokens, len(self.answers)
        constant = np.full(num, self.constant), np.tile(self.constant_ranges, (num, 1))
        return {
            "classifier": compute_score(self.tree, self.tree_ranges, outputs),
            "mean by prompt length": compute_score(self.mean, get_ranges(self.mean), outputs),
            "one length for all": compute_score(*constant, outputs),
        }


def predict_outputs(data: Path, service: str, error: float) -> Predictions:
    """Predictions for the last 30 % of an hour in November 2023 (Azure/AzurePublicDataset,
    CC-BY-4.0)."""
    path = data / f"AzureLLMInferenceTrace_2023_{SERVICES[service]}.csv"
    answers = read_answers(path, error)
    begin = round(TRAINING_SHARE * len(answers))
    training, test = answers.select(0, begin), answers.select(begin, len(answers))
    outputs = training.output_tokens
    tree, ranges = Classifier(training).predict(test)
    mean = predict_by_mean(answers)[begin:]
    constant = float(outputs.mean())
    return Predictions(test, constant, find_likeliest_ranges(outputs), mean, tree, ranges)
