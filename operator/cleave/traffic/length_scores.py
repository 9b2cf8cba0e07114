"""How well outputs are foretold: a classifier, the mean by prompt length, one length for all.

Called by the training and by `cleave lengths evaluate`. What is hard: the mean learns as it goes,
and from answers only that have ended, so it is played in the order of the trace.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cleave.policy.lengths import ConditionalMean
from cleave.traffic.length_file import GRANULARITIES, LengthFile, Score, Scores

FIRST = 256.0
"""Foretold before any answer has ended, as a gateway does."""
BEHIND = 500
"""Requests that run when one comes: their outputs are not known yet."""

Counts = NDArray[np.int64]
Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Answers:
    """Requests that ended by themselves, in the order of the trace; arrays of equal length."""

    prompt_tokens: Counts
    """As estimated when they came."""
    limits: Counts
    """Of their outputs; 0: none."""
    output_tokens: Counts

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def part(self, begin: int, end: int) -> "Answers":
        """Those from `begin` to before `end`."""
        return Answers(
            self.prompt_tokens[begin:end], self.limits[begin:end], self.output_tokens[begin:end]
        )


def judge(trained: LengthFile, answers: Answers, begin: int = 0) -> Scores:
    """Of the answers from `begin` on; the mean learns from those before, too."""
    evaluated = answers.part(begin, len(answers))
    outputs = evaluated.output_tokens
    tree = trained.tree
    inputs = list(zip(evaluated.prompt_tokens.tolist(), evaluated.limits.tolist(), strict=True))
    leaves = np.array([tree.find_leaf(*each) for each in inputs])
    ranges = np.array(trained.ranges)
    means = play_mean(answers)[begin:]
    return Scores(
        score(np.array([tree.predict(*each) for each in inputs]), ranges[leaves], outputs),
        score(means, _ranges_of(means), outputs),
        # The root's: those of all requests that it was trained on.
        score(
            np.full(len(outputs), trained.tokens[0]),
            np.repeat(ranges[:1], len(outputs), axis=0),
            outputs,
        ),
    )


def score(tokens: Values, ranges: Counts, outputs: Counts) -> Score:
    """`ranges`: foretold ones, a column for each granularity."""
    right = (ranges == _ranges_of(outputs)).mean(axis=0)
    return Score(
        [round(float(share), 4) for share in right],
        round(float(np.abs(tokens - outputs).mean()), 2),
        round(float(tokens.sum() / outputs.sum() - 1), 4),
    )


def play_mean(answers: Answers) -> Values:
    """What the mean by prompt length foretells of each, learning from those before."""
    mean = ConditionalMean(FIRST)
    foretold = np.empty(len(answers))
    prompts, limits = answers.prompt_tokens.tolist(), answers.limits.tolist()
    outputs = answers.output_tokens.tolist()
    for at, prompt in enumerate(prompts):
        foretold[at] = mean.predict(prompt, limits[at])
        if at >= BEHIND:
            mean.learn(prompts[at - BEHIND], outputs[at - BEHIND])
    return foretold


def _ranges_of(tokens: Values | Counts) -> Counts:
    """Number of each one's range, a column for each granularity."""
    numbers: Counts = (tokens[:, None] // np.array(GRANULARITIES)).astype(np.int64)
    return numbers
