"""A trained classifier of output lengths as a file, with the judgement of it.

Written by `cleave lengths train`, read by gateways at their start. What is hard: a gateway shall
never be worse off for a file, so the file says how it did beside the mean by prompt length, on
requests that came after those it was trained on; and a damaged one must be told at the start, not
met by a request.
"""

import math
from pathlib import Path
from statistics import fmean

import msgspec

from cleave.policy.length_ranges import LIMIT, PROMPT_TOKENS, Nodes, RangeTree

FORMAT = 1
MAX_BYTES = 1 << 20
"""What a ConfigMap holds."""
GRANULARITIES = (100, 200, 400)
"""Widths of ranges in tokens, as TetriInfer's."""

_LEAST_GAIN = 0.02
"""Of the mean absolute error; less is chance."""
_SLACK = 0.01
"""Of the accuracy, mean over granularities; less is chance."""


class LengthsError(ValueError):
    """The file cannot be used; one line that names it, the fault and the remedy."""


class Score(msgspec.Struct, frozen=True, rename="camel"):
    """How well outputs were foretold."""

    accuracy: list[float]
    """Share of requests whose range was foretold, by granularity."""
    mean_absolute_error: float
    """Tokens."""
    bias: float
    """Of the sum of all outputs: 0.1 where a tenth too much was foretold."""

    def beats(self, other: "Score") -> bool:
        """Whether errors are smaller, and ranges are not right less often."""
        is_nearer = self.mean_absolute_error < (1 - _LEAST_GAIN) * other.mean_absolute_error
        return is_nearer and fmean(self.accuracy) >= fmean(other.accuracy) - _SLACK


class Scores(msgspec.Struct, frozen=True, rename="camel"):
    """Of the same requests."""

    classifier: Score
    conditional_mean: Score
    """The mean by prompt length, learning as it goes: what gateways do without a file."""
    constant: Score

    @property
    def is_better(self) -> bool:
        """Whether the classifier is, than what gateways do without it."""
        return self.classifier.beats(self.conditional_mean)

    @property
    def comparison(self) -> str:
        """In words."""
        mine, its = self.classifier, self.conditional_mean
        return (
            f"{'better' if self.is_better else 'not better'} than the mean by prompt length: "
            f"{mine.mean_absolute_error:.1f} instead of {its.mean_absolute_error:.1f} tokens off, "
            f"ranges of {GRANULARITIES[1]} right {mine.accuracy[1]:.1%} instead of "
            f"{its.accuracy[1]:.1%}"
        )


class LengthFile(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """What is in the file."""

    format: int
    trace: str
    """Name of the file that it was trained from."""
    trained_on: int
    """Requests, the first of the trace."""
    judged_by: int
    """Those after them."""
    prompt_error: float
    """By which prompt tokens were blurred, as those that gateways estimate are; 0: not at all."""
    scores: Scores
    features: list[int]
    thresholds: list[float]
    below: list[int]
    above: list[int]
    tokens: list[float]
    ranges: list[list[int]]
    """Of each node, the number of the likeliest range by granularity."""

    @property
    def tree(self) -> RangeTree:
        """What foretells."""
        nodes = Nodes(self.features, self.thresholds, self.below, self.above, self.tokens)
        return RangeTree(nodes)


def read(path: Path) -> LengthFile:
    """Raises LengthsError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise LengthsError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        trained = msgspec.json.decode(content, type=LengthFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _fault(path, str(error)) from error
    if fault := _find_fault(trained):
        raise _fault(path, fault)
    return trained


def write(path: Path, trained: LengthFile) -> None:
    """Raises LengthsError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(trained), indent=1) + b"\n")
    except OSError as error:
        raise LengthsError(f"{path}: cannot be written: {error.strerror}") from error


def _fault(path: Path, what: str) -> LengthsError:
    return LengthsError(f"{path}: no trained lengths: {what}; make it with cleave lengths train")


def _find_fault(trained: LengthFile) -> str:
    """Empty: a request finds its way through it."""
    if trained.format != FORMAT:
        return f"format {trained.format} instead of {FORMAT}"
    scores = (trained.scores.classifier, trained.scores.conditional_mean, trained.scores.constant)
    if any(len(score.accuracy) != len(GRANULARITIES) for score in scores):
        return f"accuracy must be {len(GRANULARITIES)} numbers"
    count = len(trained.tokens)
    columns = (trained.features, trained.thresholds, trained.below, trained.above, trained.ranges)
    if count == 0 or any(len(column) != count for column in columns):
        return "nodes are not whole"
    for at in range(count):
        below, above = trained.below[at], trained.above[at]
        # Children behind their parents: every way ends.
        if (below, above) != (0, 0) and not (at < below < count and at < above < count):
            return f"node {at} leads nowhere"
        if trained.features[at] not in (PROMPT_TOKENS, LIMIT):
            return f"node {at} compares an unknown feature {trained.features[at]}"
        if not (math.isfinite(trained.tokens[at]) and trained.tokens[at] >= 0):
            return f"node {at} foretells {trained.tokens[at]} tokens"
        if len(trained.ranges[at]) != len(GRANULARITIES):
            return f"node {at} has {len(trained.ranges[at])} ranges"
    return ""
