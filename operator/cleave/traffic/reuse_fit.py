"""Conversations that repeat as much as observed traffic does, and after as long a time. Pure.

Called by `traffic.refit`. The planner simulates prefix caches with conversations
(`traffic.conversations`); gateways record how many prompt tokens repeat after how long
(`policy.reuse_times`). What is hard: each cache has what all prompts begin with once, however many
conversations there are, so it must not count as turns of conversations. The next turn of a
conversation comes after the answer to the one before it; what repeats sooner is shared.
"""

from dataclasses import replace

import numpy as np

from cleave.api.workload import Reuse
from cleave.traffic.characterization import round_significant
from cleave.traffic.conversations import Conversations
from cleave.traffic.counters import Buckets
from cleave.traffic.window import TrafficWindow
from cleave.traffic.workload import Quantiles

LEAST_SHARE = 0.05
"""Share of repeated tokens from which a plan counts on them: below, gateways look up a sample."""
_REQUESTS = 4_096
"""Drawn requests for which the share of repeated tokens is computed."""
_MAX_TURNS = 1_000.0
_STEPS = 20


def get_repeated_share(reuse: Buckets) -> float | None:
    """Share of prompt tokens with which an earlier prompt began; None: gateways count none."""
    return _count_within(reuse, float("inf")) / reuse.num if reuse.num else None


def fit_reuse(observed: TrafficWindow, prompts: Quantiles) -> Reuse | None:
    """The conversations of a window with these lengths of prompts; None: too little repeats."""
    reuse, share = observed.reuse, get_repeated_share(observed.reuse)
    if share is None or share < LEAST_SHARE:
        return None
    output = observed.outputs.mean or 1.0
    answer_s = (observed.ttft.mean or 0.0) + output * (observed.tpot.mean or 0.0)
    shared_share = _count_within(reuse, answer_s) / reuse.num
    lengths = prompts.draw(np.random.default_rng(0), _REQUESTS)
    mean = float(lengths.mean())
    new_tokens = max(min(output, (1 - share) * mean / 2), 1.0)
    conversations = Conversations(1.0, 0.0, round(new_tokens), round(shared_share * mean))
    low, high = 1.0, _MAX_TURNS
    for _ in range(_STEPS):
        turns = (low * high) ** 0.5
        if _compute_share(replace(conversations, turns=turns), prompts) < share:
            low = turns
        else:
            high = turns
    return Reuse(
        turns=round_significant(low),
        turn_interval_s=round_significant(_compute_mean_s(reuse, answer_s)),
        new_tokens=conversations.new_tokens,
        shared_tokens=conversations.shared_tokens,
    )


def _compute_share(conversations: Conversations, prompts: Quantiles) -> float:
    """Share of prompt tokens that repeat, as `Conversations.build_blocks` has it."""
    drawn = conversations.draw_turns(_REQUESTS, 0)
    lengths = prompts.draw(np.random.default_rng(0), len(drawn.owner))
    tokens = lengths[drawn.sort_by(lengths)]
    before = np.where(drawn.turn > 0, np.roll(tokens, 1), conversations.shared_tokens)
    known = np.clip(tokens - conversations.new_tokens, 0, before)
    return float(known.sum() / tokens.sum())


def _count_within(reuse: Buckets, age_s: float) -> float:
    """Tokens used again within that time; those inside a bucket are spread evenly."""
    bounds, counts = (0.0, *reuse.bounds[:-1]), (0.0, *reuse.counts[:-1])
    return float(np.interp(age_s, bounds, counts))


def _compute_mean_s(reuse: Buckets, least_s: float) -> float:
    """Mean time of tokens that are used again after `least_s` or more, those of a bucket at its
    middle; 0: there are none."""
    bounds = np.maximum((0.0, *reuse.bounds[:-1]), least_s)
    tokens = np.diff([_count_within(reuse, bound) for bound in bounds])
    middles = (bounds[1:] + bounds[:-1]) / 2
    return float(np.average(middles, weights=tokens)) if tokens.sum() > 0 else 0.0
