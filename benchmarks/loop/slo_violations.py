"""Where a day loses requests that an oracle serves in time: while what goes on."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from replanning import Step
from virtual_fleet import Score

STAGES = ("unseen", "undecided", "starting", "changing again", "settled")
"""Of a phase: until its change is seen, until the planner has decided, until that plan is in force,
until its last one is, and the rest."""


def find_losses(
    score: Score, oracle: Score, steps: Sequence[Step], edges: Sequence[float]
) -> dict[str, float]:
    """By stage, as shares of all that the oracle serves in time; below 0: more than the oracle.

    `edges`: the phases' beginnings and the end.
    """
    stages = _find_stages(score.arrival_s, steps, edges)
    missed = oracle.met.astype(int) - score.met
    whole = np.count_nonzero(oracle.met)
    return {
        stage: float(missed[stages == number].sum() / whole) for number, stage in enumerate(STAGES)
    }


def _find_stages(
    arrival_s: np.ndarray, steps: Sequence[Step], edges: Sequence[float]
) -> np.ndarray:
    """The number of the stage in which each request came."""
    stages = np.full(len(arrival_s), len(STAGES) - 1)
    for start_s, end_s in pairwise(edges):
        mine = [step for step in steps if start_s < step.decided_s <= end_s]
        if not mine:
            continue
        first, last = mine[0], mine[-1]
        ends_s = (first.seen_s, first.decided_s, first.at_s, last.at_s)
        came = (arrival_s >= start_s) & (arrival_s < end_s)
        stages[came] = np.searchsorted(ends_s, arrival_s[came], side="right")
    return stages
