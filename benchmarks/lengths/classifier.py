"""Predicts output lengths by a decision tree, as TetriInfer does by a language model (3.3.2).

The tree separates ranges of 100 output tokens by the prompt's tokens, and predicts the mean of a
request's leaf. What is hard: gateways estimate prompt tokens from bytes, while a trace has exact
counts; a tree trained on these would use splits finer than the estimates, so the same noise is
added. And it has to predict later traffic: it is trained on the first requests and evaluated on the
last. The mean by prompt length, which gateways use, learns from each request that has ended.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sklearn.tree import DecisionTreeClassifier

from cleave.policy.output_length import ConditionalMean
from cleave.traffic.history import read_trace

GRANULARITIES = (100, 200, 400)
"""Widths of length ranges in tokens, as in TetriInfer."""
TRAINING_SHARE = 0.7
MAX_LEAVES = 64
MIN_LEAF_REQUESTS = 100
MAX_OUTPUT_TOKENS = 4_000
"""Longer outputs form one range."""
INITIAL_TOKENS = 256.0
"""Prediction of the mean before any request has completed, as in a gateway."""
IN_FLIGHT_REQUESTS = 500
"""Requests assumed in flight when one arrives: their outputs are not known yet."""

Counts = NDArray[np.int64]
Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Answers:
    """Requests in the order of a trace; arrays of equal length."""

    prompt_tokens: Counts
    """As estimated on arrival."""
    output_tokens: Counts

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def select(self, begin: int, end: int) -> "Answers":
        """Requests `begin` to `end`, the end excluded."""
        return Answers(self.prompt_tokens[begin:end], self.output_tokens[begin:end])


@dataclass(frozen=True, slots=True)
class Score:
    """How well output lengths were predicted."""

    accuracy: list[float]
    """Share of requests whose range was predicted, by granularity."""
    mean_absolute_error: float
    """In tokens."""
    bias: float
    """Relative error of the sum of all outputs: 0.1 if a tenth too much was predicted."""


class Classifier:
    """A tree trained on answers."""

    def __init__(self, answers: Answers) -> None:
        outputs = answers.output_tokens
        classes = np.minimum(outputs, MAX_OUTPUT_TOKENS) // GRANULARITIES[0]
        self._model = DecisionTreeClassifier(
            max_leaf_nodes=MAX_LEAVES, min_samples_leaf=MIN_LEAF_REQUESTS, random_state=0
        )
        leaves = self._model.fit(answers.prompt_tokens[:, None], classes).apply(
            answers.prompt_tokens[:, None]
        )
        members = {leaf: outputs[leaves == leaf] for leaf in np.unique(leaves)}
        self._means = {leaf: float(each.mean()) for leaf, each in members.items()}
        self._ranges = {leaf: find_likeliest_ranges(each) for leaf, each in members.items()}

    def predict(self, answers: Answers) -> tuple[Values, Counts]:
        """(mean of each request's leaf, its likeliest range, one column per granularity)."""
        leaves = self._model.apply(answers.prompt_tokens[:, None])
        return (
            np.array([self._means[leaf] for leaf in leaves]),
            np.array([self._ranges[leaf] for leaf in leaves]),
        )


def read_answers(path: Path, prompt_error: float) -> Answers:
    """The requests of a trace, with relative noise in prompt tokens, equal on every call."""
    trace = read_trace(path)
    factors = np.exp(np.random.default_rng(0).normal(0.0, prompt_error, len(trace)))
    prompts = np.maximum(np.rint(trace.prompt_tokens * factors), 1).astype(np.int64)
    return Answers(prompts, trace.output_tokens)


def predict_by_mean(answers: Answers) -> Values:
    """Predictions of the mean by prompt length, which learns from the requests before each."""
    mean = ConditionalMean(INITIAL_TOKENS)
    predictions = np.empty(len(answers))
    prompts, outputs = answers.prompt_tokens.tolist(), answers.output_tokens.tolist()
    for at, prompt in enumerate(prompts):
        predictions[at] = mean.predict(prompt)
        if at >= IN_FLIGHT_REQUESTS:
            mean.observe(prompts[at - IN_FLIGHT_REQUESTS], outputs[at - IN_FLIGHT_REQUESTS])
    return predictions


def compute_score(tokens: Values, ranges: Counts, outputs: Counts) -> Score:
    """`ranges`: predicted range indices, one column per granularity."""
    accuracy = (ranges == get_ranges(outputs)).mean(axis=0)
    error = float(np.abs(tokens - outputs).mean())
    return Score(accuracy.tolist(), error, float(tokens.sum() / outputs.sum() - 1))


def get_ranges(tokens: Values | Counts) -> Counts:
    """Index of each request's range, one column per granularity."""
    return (tokens[:, None] // np.array(GRANULARITIES)).astype(np.int64)


def find_likeliest_ranges(outputs: Counts) -> list[int]:
    """Index of the range with most outputs, by granularity."""
    return [int(np.bincount(outputs // width).argmax()) for width in GRANULARITIES]
