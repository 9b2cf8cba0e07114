"""Azure's two services with what each way to predict outputs says of their last requests."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cleave.traffic import length_training
from cleave.traffic.length_file import GRANULARITIES, LengthFile, Score
from cleave.traffic.length_training import CompletedRequests

SERVICES = {"code": "code", "conversation": "conv"}
ERRORS = (0.0, length_training.PROMPT_ERROR)
"""Of prompt tokens: as counted, and as gateways estimate them."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """The test set and its predicted outputs; arrays of equal length."""

    answers: CompletedRequests
    mean: NDArray[np.float64]
    """By the mean by prompt length."""
    tree: NDArray[np.float64]
    """By the classifier: the mean of its leaf."""
    low: NDArray[np.int64]
    """By the classifier: the low end of the likeliest range of 200 tokens, as TetriInfer does."""


def find(data: Path, service: str) -> Path:
    """An hour of it in November 2023 (Azure/AzurePublicDataset, CC-BY-4.0)."""
    return data / f"AzureLLMInferenceTrace_2023_{SERVICES[service]}.csv"


def score(data: Path, service: str, error: float) -> tuple[LengthFile, dict[str, Score]]:
    """A trained file, and how each way does on the last 30 % of the trace."""
    found = length_training.train(find(data, service), error)
    scores = found.scores
    return found, {
        "classifier": scores.classifier,
        "mean by prompt length": scores.conditional_mean,
        "one length for all": scores.constant,
    }


def predict_outputs(data: Path, service: str, error: float) -> Predictions:
    """Predictions for the test set."""
    found, _ = score(data, service, error)
    answers, _ = length_training.read_requests(find(data, service), error)
    begin = found.trained_on
    test_answers = answers.select(begin, len(answers))
    leaves = [found.tree.find_leaf(prompt) for prompt in test_answers.prompt_tokens.tolist()]
    width = GRANULARITIES[1]
    return Predictions(
        test_answers,
        length_training.predict_by_mean(answers)[begin:],
        np.array(found.tokens)[leaves],
        np.maximum(np.array(found.ranges)[leaves, 1] * width, 1),
    )
