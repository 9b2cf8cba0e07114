"""Trains and scores a classifier of output lengths on recorded requests, for `cleave lengths`.

What is hard: gateways estimate prompt tokens from bytes, while a trace contains exact counts. A
tree trained on exact counts would use splits finer than the estimates; so the same noise is added
to the counts. And the classifier has to predict later traffic: it is trained on the first requests
and evaluated on the last. The mean by prompt length, with which it is compared, is updated with
every completed request and uses only those, so it is evaluated in the order of the trace.

Source: TetriInfer, section 3.3.2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from cleave import distribution
from cleave.policy.output_length import ConditionalMean
from cleave.traffic import history, length_file
from cleave.traffic.length_file import GRANULARITIES, LengthFile, LengthsError, Score, Scores

MIN_REQUESTS = 1_000
"""Minimum number of requests: fewer do not represent the longest tenth."""
PROMPT_ERROR = 0.2
"""Usual relative error of prompt tokens that are estimated from bytes."""

_TRAINING_SHARE = 0.7
"""Share of the trace used for training; the rest is for evaluation."""
_MAX_LEAVES = 64
_MIN_LEAF_REQUESTS = 100
_MAX_OUTPUT_TOKENS = 4_000
"""Longer outputs form one range."""
_ESTIMATES = ("estimatedprompttokens",)
_LIMITS = ("maxtokens", "maxcompletiontokens", "maxoutputtokens")
_NO_SCORE = Score([0.0] * len(GRANULARITIES), 0.0, 0.0)

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
        cut = slice(begin, end)
        return CompletedRequests(self.prompt_tokens[cut], self.limits[cut], self.output_tokens[cut])


def read_requests(
    path: Path, prompt_error: float = PROMPT_ERROR
) -> tuple[CompletedRequests, float]:
    """The requests of a trace that ended by themselves, and the noise added to their prompt tokens.
    Raises HistoryError and LengthsError."""
    trace, (estimates, limits) = history.read_trace_with_columns(path, _ESTIMATES, _LIMITS)
    if estimates is None:
        prompts, error = _blur(trace.prompt_tokens, prompt_error), prompt_error
    else:
        prompts, error = estimates, 0.0
    if limits is None:
        limits = np.zeros(len(trace), dtype=np.int64)
    # Outputs cut by their limit do not show the natural length; gateways ignore them as well.
    ended = (limits == 0) | (trace.output_tokens < limits)
    answers = CompletedRequests(prompts[ended], limits[ended], trace.output_tokens[ended])
    if len(answers) < MIN_REQUESTS:
        raise LengthsError(
            f"{path}: {len(answers):,} requests ended before their limit; "
            f"{MIN_REQUESTS:,} are needed: record more traffic"
        )
    return answers, error


def train(path: Path, prompt_error: float = PROMPT_ERROR) -> LengthFile:
    """Train a classifier on the first requests of a trace and evaluate it on the last ones. Raises
    HistoryError and LengthsError."""
    answers, error = read_requests(path, prompt_error)
    trained = round(_TRAINING_SHARE * len(answers))
    file = LengthFile(
        format=length_file.FORMAT,
        trace=path.name,
        trained_on=trained,
        judged_by=len(answers) - trained,
        prompt_error=error,
        scores=Scores(_NO_SCORE, _NO_SCORE, _NO_SCORE),
        **_fit(answers.select(0, trained)),
    )
    return msgspec.structs.replace(file, scores=evaluate_classifier(file, answers, trained))


def _blur(tokens: Counts, error: float) -> Counts:
    """Add noise as if the counts had been estimated; equal on every call."""
    factors = np.exp(np.random.default_rng(0).normal(0.0, error, len(tokens)))
    blurred: Counts = np.maximum(np.rint(tokens * factors), 1).astype(np.int64)
    return blurred


def _fit(answers: CompletedRequests) -> dict[str, Any]:
    """Fit a decision tree; returns its nodes as fields of `LengthFile`."""
    try:
        from sklearn.tree import DecisionTreeClassifier
    except ImportError:
        raise LengthsError(
            f"training needs the extra lengths: {distribution.build_install_command(['lengths'])} "
            "(gateways do not need it)"
        ) from None
    inputs = np.column_stack([answers.prompt_tokens, answers.limits])
    outputs = answers.output_tokens
    classes = np.minimum(outputs, _MAX_OUTPUT_TOKENS) // GRANULARITIES[0]
    model = DecisionTreeClassifier(
        max_leaf_nodes=_MAX_LEAVES, min_samples_leaf=_MIN_LEAF_REQUESTS, random_state=0
    )
    tree = model.fit(inputs, classes).tree_
    paths = model.decision_path(inputs).tocsc()
    members = [outputs[each] for each in np.split(paths.indices, paths.indptr[1:-1])]
    is_leaf = tree.children_left < 0
    return {
        "features": np.where(is_leaf, 0, tree.feature).tolist(),
        "thresholds": np.where(is_leaf, 0.0, tree.threshold).tolist(),
        "below": np.where(is_leaf, 0, tree.children_left).tolist(),
        "above": np.where(is_leaf, 0, tree.children_right).tolist(),
        "tokens": [round(float(each.mean()), 1) for each in members],
        "ranges": [_find_likeliest_ranges(each) for each in members],
    }


def _find_likeliest_ranges(outputs: Counts) -> Sequence[int]:
    """Index of the range with most outputs, by granularity."""
    return [int(np.bincount(outputs // width).argmax()) for width in GRANULARITIES]


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
