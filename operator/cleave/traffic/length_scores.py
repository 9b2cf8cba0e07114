"""Scores predictors of output lengths: a classifier, the mean by prompt length, a constant.

Called by the training and by `cleave lengths evaluate`. What is hard: the mean is updated with
every completed request and uses only those, so it is evaluated in the order of the trace.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cleave.policy.output_length import ConditionalMean
from cleave.traffic.length_file import GRANULARITIES, LengthFile, Score, Scores

INITIAL_TOKENS = 256.0
"""Prediction before any request has completed, as in a gateway."""
IN_FLIGHT_REQUESTS = 500
"""Requests assumed in flight when one arrives: their outputs are not known yet."""

Counts = NDArray[np.int64]
Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CompletedRequests:
    """Requests that ended by themselves, in the order of the trace; arrays of equal length."""

    prompt_tokens: Counts
    """As estimated on arrival."""
    limits: Counts
    """Limits of their outputs; 0: none."""
    output_tokens: Counts

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def select(self, begin: int, end: int) -> "CompletedRequests":
        """Requests `begin` to `end`, the end excluded."""
        return CompletedRequests(
            self.prompt_tokens[begin:end], self.limits[begin:end], self.output_tokens[begin:end]
        )


def evaluate_classifier(trained: LengthFile, requests: CompletedRequests, begin: int = 0) -> Scores:
    """Score the predictors on requests from `begin` on; the mean also learns from those before."""
    evaluated = requests.select(begin, len(requests))
    outputs = evaluated.output_tokens
    tree = trained.tree
    inputs = list(zip(evaluated.prompt_tokens.tolist(), evaluated.limits.tolist(), strict=True))
    leaves = np.array([tree.find_leaf(*each) for each in inputs])
    ranges = np.array(trained.ranges)
    means = predict_by_mean(requests)[begin:]
    return Scores(
        compute_score(np.array([tree.predict(*each) for each in inputs]), ranges[leaves], outputs),
        compute_score(means, _get_ranges(means), outputs),
        # The root node holds the mean and the ranges of all training requests.
        compute_score(
            np.full(len(outputs), trained.tokens[0]),
            np.repeat(ranges[:1], len(outputs), axis=0),
            outputs,
        ),
    )


def compute_score(tokens: Values, ranges: Counts, outputs: Counts) -> Score:
    """`ranges`: predicted range indices, one column per granularity."""
    accuracy = (ranges == _get_ranges(outputs)).mean(axis=0)
    return Score(
        [round(float(share), 4) for share in accuracy],
        round(float(np.abs(tokens - outputs).mean()), 2),
        round(float(tokens.sum() / outputs.sum() - 1), 4),
    )


def predict_by_mean(requests: CompletedRequests) -> Values:
    """Predictions of the mean by prompt length, which learns from the requests before each."""
    mean = ConditionalMean(INITIAL_TOKENS)
    predictions = np.empty(len(requests))
    prompts, limits = requests.prompt_tokens.tolist(), requests.limits.tolist()
    outputs = requests.output_tokens.tolist()
    for at, prompt in enumerate(prompts):
        predictions[at] = mean.predict(prompt, limits[at])
        if at >= IN_FLIGHT_REQUESTS:
            mean.observe(prompts[at - IN_FLIGHT_REQUESTS], outputs[at - IN_FLIGHT_REQUESTS])
    return predictions


def _get_ranges(tokens: Values | Counts) -> Counts:
    """Index of each request's range, one column per granularity."""
    numbers: Counts = (tokens[:, None] // np.array(GRANULARITIES)).astype(np.int64)
    return numbers
