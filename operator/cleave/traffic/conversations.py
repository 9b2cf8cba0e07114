"""Which requests of generated traffic are turns of one conversation, and which blocks they share.

Used by `traffic.workload` where `spec.workload.reuse` states conversations. What is hard: lengths
are stated for all requests, and must stay so, because windows of observed traffic are compared with
them. So lengths are drawn first, for whole conversations, and the turns of each are put in order of
their prompts: a prompt begins with the one before it, except for what has to be new at its end. A
longer draw begins with the shorter one, like all that is drawn.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cleave.simulator.trace import MAX_BLOCKS_PER_PROMPT, PromptBlocks

_LEAST_BLOCK, _LARGEST_BLOCK = 16, 512
"""Tokens; the former is vLLM's block of KV, and every larger one here a multiple of it."""
_BLOCKS_PER_TURN = 4
"""Blocks in the new tokens of a turn: about an eighth of them counts as new too often."""
_MARGIN_SESSIONS = 16
_SESSIONS, _PAUSES = 3, 4
"""Streams of a seed; `traffic.workload` has the ones before."""
_MAX_LOOKBACK = 200_000
"""Most requests before the first one among which conversations in progress have begun."""

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations of a geometrically distributed number of turns."""

    turns: float
    """Mean number of turns, at least 1."""
    interval_requests: float
    """Mean number of requests of all conversations between two turns of one: rate x interval."""
    new_tokens: int
    """Fewest tokens at the end of a prompt that no earlier prompt has."""
    shared_tokens: int = 0
    """Tokens that all prompts begin with."""

    def choose_block_tokens(self, mean_prompt: float) -> int:
        """The blocks that are compared, a power of two: a mean prompt has MAX_BLOCKS_PER_PROMPT of
        them at most, however few of its tokens are new."""
        most = min(max(self.new_tokens // _BLOCKS_PER_TURN, _LEAST_BLOCK), _LARGEST_BLOCK)
        least = math.ceil(mean_prompt / MAX_BLOCKS_PER_PROMPT)
        return max(1 << most.bit_length() - 1, 1 << (least - 1).bit_length())

    def draw_turns(self, num: int, seed: int) -> "Turns":
        """Conversations of which the first `num` requests are turns.

        They begin evenly, one per `turns` requests; gaps between turns are exponential. Those that
        began before the first request and go on are included. Longer ones than the lookback are cut
        into several, or nearly all of their turns would be drawn in vain.
        """
        interval = self.interval_requests
        if interval > 0 and self.turns > (most := 1 + _MAX_LOOKBACK / interval):
            return replace(self, turns=most).draw_turns(num, seed)
        lookback = min(4 * self.turns * interval, _MAX_LOOKBACK)
        sessions = int((lookback + 1.1 * num) / self.turns) + _MARGIN_SESSIONS
        while True:
            drawn = self._draw_sessions(sessions, lookback, seed)
            if len(drawn.order) >= num:
                return replace(drawn, order=drawn.order[:num])
            sessions *= 2

    def _draw_sessions(self, sessions: int, lookback: float, seed: int) -> "Turns":
        # A row per conversation, so that those of a longer draw begin with these.
        uniform = np.random.default_rng((seed, _SESSIONS)).random((sessions, 2))
        begin = (np.arange(sessions) + uniform[:, 0]) * self.turns - lookback
        lengths = _draw_geometric(uniform[:, 1], self.turns)
        owner = np.repeat(np.arange(sessions), lengths)
        first = np.cumsum(lengths) - lengths
        turn = np.arange(len(owner)) - first[owner]
        pauses = np.random.default_rng((seed, _PAUSES)).standard_exponential(len(owner))
        elapsed = np.cumsum(np.where(turn == 0, 0.0, pauses * self.interval_requests))
        at = begin[owner] + elapsed - elapsed[first][owner]
        order = np.argsort(at, kind="stable")
        # Conversations that are not drawn begin later than the last one.
        is_known = (at[order] >= 0) & (at[order] < begin[-1])
        return Turns(owner, first, turn, order[is_known])

    def build_blocks(self, drawn: "Turns", prompt_tokens: Numbers, size: int) -> PromptBlocks:
        """The blocks of prompts, of `size` tokens; `prompt_tokens`: of all turns, growing in each
        conversation."""
        used = -(-prompt_tokens // size)
        before = np.where(drawn.turn > 0, np.roll(prompt_tokens, 1), 0)
        known = np.minimum(before, np.maximum(prompt_tokens - self.new_tokens, 0)) // size
        shared = self.shared_tokens // size
        base = shared + np.cumsum(used - known) - (used - known)
        counts = used[drawn.order]
        starts = np.concatenate(([0], np.cumsum(counts)))
        own = np.repeat(drawn.order, counts)
        at = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
        # A block is that of the last turn, up to this one, that has it but did not find it.
        # `known` never falls within a conversation, so these turns are its first ones.
        width = int(used.max()) + 1
        keys = drawn.owner * width + known
        last = np.searchsorted(keys, drawn.owner[own] * width + at, side="right") - 1
        source = np.minimum(last, own)
        numbers = base[source] + at - known[source]
        # The first prompt of a conversation is the shortest.
        least = np.maximum(prompt_tokens[drawn.first] - self.new_tokens, 0) // size
        common = at < np.minimum(shared, least[drawn.owner[own]])
        return PromptBlocks(
            size, starts, np.where(common, at, numbers), int(base[-1] + used[-1] - known[-1])
        )


@dataclass(frozen=True, slots=True, eq=False)
class Turns:
    """All turns of drawn conversations, one conversation after another."""

    owner: Numbers
    """By turn its conversation, never decreasing."""
    first: Numbers
    """By conversation its first turn."""
    turn: Numbers
    """Number in its conversation, from 0."""
    order: Numbers
    """The turns that are requests of the draw, in order of arrival."""

    def sort_by(self, prompt_tokens: NDArray[np.float64]) -> Numbers:
        """The order that puts the turns of each conversation in that of their prompts' lengths."""
        return np.asarray(np.lexsort((prompt_tokens, self.owner)), np.int64)


def _draw_geometric(uniform: NDArray[np.float64], mean: float) -> Numbers:
    """Numbers from 1 on with this mean, by inverse transform."""
    if mean <= 1:
        return np.ones(len(uniform), np.int64)
    drawn = np.floor(np.log1p(-uniform) / np.log1p(-1 / mean)) + 1
    return np.asarray(drawn, np.int64)
