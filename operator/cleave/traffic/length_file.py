"""The file of a trained classifier of output lengths, with the scores of its evaluation.

Written by `cleave lengths train`, read by gateways at their start. What is hard: a file must never
make a gateway worse. It therefore contains its scores beside those of the mean by prompt length, on
requests that came after those it was trained on; and a damaged file is detected at the start, not
when a request uses it.
"""

import math
from pathlib import Path
from statistics import fmean

import msgspec

from cleave.policy.output_length import OUTPUT_LIMIT, PROMPT_TOKENS, RangeTree, TreeNodes

FORMAT = 1
MAX_BYTES = 1 << 20
"""The size limit of a ConfigMap."""
GRANULARITIES = (100, 200, 400)
"""Widths of length ranges in tokens, as in TetriInfer."""

_MIN_GAIN = 0.02
"""Smallest relative gain in mean absolute error that counts as significant."""
_ACCURACY_TOLERANCE = 0.01
"""Loss of accuracy, averaged over granularities, that counts as insignificant."""


class LengthsError(ValueError):
    """The file cannot be used; one line with its name, the fault and the remedy."""


class Score(msgspec.Struct, frozen=True, rename="camel"):
    """How well output lengths were predicted."""

    accuracy: list[float]
    """Share of requests whose range was predicted, by granularity."""
    mean_absolute_error: float
    """In tokens."""
    bias: float
    """Relative error of the sum of all outputs: 0.1 if a tenth too much was predicted."""

    def is_better_than(self, other: "Score") -> bool:
        """Whether errors are smaller and ranges are correct at least as often."""
        is_nearer = self.mean_absolute_error < (1 - _MIN_GAIN) * other.mean_absolute_error
        return is_nearer and fmean(self.accuracy) >= fmean(other.accuracy) - _ACCURACY_TOLERANCE


class Scores(msgspec.Struct, frozen=True, rename="camel"):
    """Scores of three predictors on the same requests."""

    classifier: Score
    conditional_mean: Score
    """The mean by prompt length, updated with every request: what gateways use without a file."""
    constant: Score

    @property
    def is_better(self) -> bool:
        """Whether the classifier is better than what gateways use without it."""
        return self.classifier.is_better_than(self.conditional_mean)

    @property
    def comparison(self) -> str:
        """One sentence that compares both."""
        tree, mean = self.classifier, self.conditional_mean
        return (
            f"{'better' if self.is_better else 'not better'} than the mean by prompt length: "
            f"{tree.mean_absolute_error:.1f} instead of {mean.mean_absolute_error:.1f} tokens off, "
            f"ranges of {GRANULARITIES[1]} right {tree.accuracy[1]:.1%} instead of "
            f"{mean.accuracy[1]:.1%}"
        )


class LengthFile(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """The content of the file."""

    format: int
    trace: str
    """Name of the training trace."""
    trained_on: int
    """Number of training requests, the first ones of the trace."""
    judged_by: int
    """Number of evaluation requests, the remaining ones."""
    prompt_error: float
    """Relative noise added to prompt tokens, to resemble the gateways' estimates; 0: none."""
    scores: Scores
    features: list[int]
    thresholds: list[float]
    below: list[int]
    above: list[int]
    tokens: list[float]
    ranges: list[list[int]]
    """For each node, the index of the most frequent range by granularity."""

    @property
    def tree(self) -> RangeTree:
        """The tree that predicts lengths."""
        nodes = TreeNodes(self.features, self.thresholds, self.below, self.above, self.tokens)
        return RangeTree(nodes)


def read_length_file(path: Path) -> LengthFile:
    """Read and validate a file. Raises LengthsError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise LengthsError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        trained = msgspec.json.decode(content, type=LengthFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _build_error(path, str(error)) from error
    if fault := _find_fault(trained):
        raise _build_error(path, fault)
    return trained


def write_length_file(path: Path, trained: LengthFile) -> None:
    """Write a file. Raises LengthsError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(trained), indent=1) + b"\n")
    except OSError as error:
        raise LengthsError(f"{path}: cannot be written: {error.strerror}") from error


def _build_error(path: Path, what: str) -> LengthsError:
    remedy = "make it with cleave lengths train"
    return LengthsError(f"{path}: not a file of trained lengths: {what}; {remedy}")


def _find_fault(trained: LengthFile) -> str:
    """The first fault of the tree or its scores; an empty string if there is none."""
    if trained.format != FORMAT:
        return f"format {trained.format} instead of {FORMAT}"
    scores = (trained.scores.classifier, trained.scores.conditional_mean, trained.scores.constant)
    if any(len(score.accuracy) != len(GRANULARITIES) for score in scores):
        return f"accuracy must be {len(GRANULARITIES)} numbers"
    count = len(trained.tokens)
    columns = (trained.features, trained.thresholds, trained.below, trained.above, trained.ranges)
    if count == 0 or any(len(column) != count for column in columns):
        return "nodes are incomplete"
    for at in range(count):
        below, above = trained.below[at], trained.above[at]
        # Children come after their parents, so every path ends.
        if (below, above) != (0, 0) and not (at < below < count and at < above < count):
            return f"node {at} has invalid children"
        if trained.features[at] not in (PROMPT_TOKENS, OUTPUT_LIMIT):
            return f"node {at} compares an unknown feature {trained.features[at]}"
        if not (math.isfinite(trained.tokens[at]) and trained.tokens[at] >= 0):
            return f"node {at} predicts {trained.tokens[at]} tokens"
        if len(trained.ranges[at]) != len(GRANULARITIES):
            return f"node {at} has {len(trained.ranges[at])} ranges"
    return ""
