"""The reuse curve: which share of the prompt tokens caches of any size find. Pure.

Gateways record after how long prompts are used again (`policy.reuse_times`), because that depends
neither on the size of caches nor on how many there are. The curve follows from these times: a cache
that evicts what was used longest ago holds all that was used within some time, so its size is the
working set of that time, and its misses are what is used again later (Denning and Schwartz,
"Properties of the working-set model", CACM 1972, section 4; Hu et al., "Kinetic modeling of data
eviction in cache", USENIX ATC 2016, section 3.2).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cleave.simulator.trace import Trace
from cleave.traffic.counters import Buckets

_STEPS_PER_BUCKET = 32
"""Points inside a bucket, between which the curve is linear."""
_BOUNDS_S = (*(2.0 ** (step / 4) for step in range(-16, 64)), math.inf)
"""Of times that are measured in a trace."""

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ReuseCurve:
    """Hit shares of prompt tokens by the tokens of KV that a cache holds."""

    kv_tokens: Values
    """Increasing, from 0."""
    hit_shares: Values
    """Of all prompt tokens, with a cache of that size."""

    def find_share(self, kv_tokens: float) -> float:
        """The hit share of one cache of that size through which all requests go."""
        return float(np.interp(kv_tokens, self.kv_tokens, self.hit_shares))


def build_curve(reuse: Buckets, prompt_rate: float, output_rate: float = 0.0) -> ReuseCurve:
    """The curve of prompt tokens by the time since their last use, in seconds, of which new ones
    are in the infinite bucket. `prompt_rate`: prompt tokens per second; `output_rate`: those of
    answers that are written to the cache as well. Raises ValueError for no tokens."""
    if not reuse.num:
        raise ValueError("reuse: no tokens were counted; read the counters of a gateway twice")
    bounds_s = (0.0, *reuse.bounds[:-1])
    counts = (0.0, *reuse.counts[:-1])
    steps = np.arange(_STEPS_PER_BUCKET * (len(bounds_s) - 1) + 1) / _STEPS_PER_BUCKET
    times_s = np.interp(steps, np.arange(len(bounds_s)), bounds_s)
    shares = np.interp(times_s, bounds_s, counts) / reuse.num
    # The working set grows with each token that was not used within the time before it.
    growth = prompt_rate * (1 - (shares[1:] + shares[:-1]) / 2) + output_rate
    kv_tokens = np.concatenate(([0.0], np.cumsum(growth * np.diff(times_s))))
    return ReuseCurve(kv_tokens, shares)


def measure_reuse(trace: Trace) -> Buckets:
    """The prompt tokens of a trace by the time since the last use of their blocks."""
    blocks, total = trace.blocks, float(trace.prompt_tokens.sum())
    if blocks is None:
        return Buckets((math.inf,), (total,))
    own = np.repeat(np.arange(len(trace)), np.diff(blocks.starts))
    at = np.arange(len(blocks.numbers)) - blocks.starts[own]
    sizes = np.clip(trace.prompt_tokens[own] - at * blocks.block_tokens, 0, blocks.block_tokens)
    order = np.argsort(blocks.numbers, kind="stable")
    is_again = np.diff(blocks.numbers[order]) == 0
    ages_s = np.diff(trace.arrival_ms[own[order]])[is_again] / 1000
    found, _ = np.histogram(ages_s, (0.0, *_BOUNDS_S), weights=sizes[order][1:][is_again])
    counts = np.cumsum(found)
    return Buckets(_BOUNDS_S, (*counts[:-1].tolist(), total))
