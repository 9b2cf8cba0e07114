"""Upper bounds on the request rate of an instance, computed without a simulation.

Used by the search to order candidates, to prune bad ones and to bound a bisection. What is hard: a
bound must never be below what a simulation finds. Each phase is therefore assumed to run the
cheapest steps that its limits allow, without idle time and without work of the other phase. Where
prompts repeat, one cache without limit is assumed to be shared by all instances.
"""

import bisect
import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cleave.perf.timing import EngineTiming, interpolate_table
from cleave.simulator.fleet import Batching, SimulatedEngine, SimulatedFleet
from cleave.simulator.trace import Trace

_PREFILL_UTILIZATION = 0.8
_MIN_RATE = 1e-3


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """Statistics of request lengths that the bounds need."""

    prompt_tokens: float
    """Mean."""
    computed_tokens: float
    """Mean of the prompt tokens that no cache can have."""
    computed_squares: float
    """Mean of the prompt's square, less that of what a cache can have of it."""
    longest_prompt: int
    decode_steps: float
    """Mean number of engine steps after the first token."""
    decode_context: float
    """Mean context of a decode step, over all steps of all requests."""
    own_context: float
    """The same without what other requests can share of its KV."""

    @classmethod
    def from_trace(cls, trace: Trace, first: int = 0) -> "LengthStatistics":
        """The statistics of these requests from number `first` on; those before it fill caches."""
        prompts = trace.prompt_tokens[first:].astype(np.float64)
        cached = trace.bound_cached_tokens()[first:].astype(np.float64)
        steps = trace.output_tokens[first:].astype(np.float64) - 1
        contexts = steps * (prompts + (steps + 1) / 2)
        total = float(steps.sum())
        return cls(
            prompt_tokens=float(prompts.mean()),
            computed_tokens=float((prompts - cached).mean()),
            computed_squares=float((prompts**2 - cached**2).mean()),
            longest_prompt=int(prompts.max()),
            decode_steps=float(steps.mean()),
            decode_context=float(contexts.sum()) / total if total else 0.0,
            own_context=float((contexts - steps * cached).sum()) / total if total else 0.0,
        )


def compute_fleet_rate(fleet: SimulatedFleet, lengths: LengthStatistics) -> float:
    """Upper bound of a fleet's rate, in req/s: the lower of both phases over their pools. Decode
    instances that compute short prompts count as if they computed all."""
    prompts, outputs = (*fleet.prefill, *fleet.mixed), (*fleet.decode, *fleet.mixed)
    if fleet.short_prompt_tokens:
        prompts += fleet.decode
    prefill = sum(pool.engines * compute_prefill_rate(pool.engine, lengths) for pool in prompts)
    decode = sum(pool.engines * compute_decode_rate(pool.engine, lengths) for pool in outputs)
    return min([prefill] * bool(prompts) + [decode] * bool(outputs), default=0.0)


def estimate_rate(fleet: SimulatedFleet, lengths: LengthStatistics, tpot_ms: float) -> float:
    """Estimated goodput in req/s, not a bound: the starting point of a search.

    Prompts use four fifths of the prefill bound, because they queue; decode steps may take as long
    as the target. Mixed instances do the work of both phases one after the other.
    """
    prefill = _PREFILL_UTILIZATION * sum(
        p.engines * compute_prefill_rate(p.engine, lengths) for p in fleet.prefill
    )
    decode = sum(p.engines * compute_decode_rate(p.engine, lengths, tpot_ms) for p in fleet.decode)
    mixed = sum(
        pool.engines
        / (
            1 / (_PREFILL_UTILIZATION * compute_prefill_rate(pool.engine, lengths))
            + 1 / max(compute_decode_rate(pool.engine, lengths, tpot_ms), _MIN_RATE)
        )
        for pool in fleet.mixed
    )
    phases = [prefill] * bool(fleet.prefill) + [decode] * bool(fleet.decode)
    return max(min(phases, default=0.0) + mixed, _MIN_RATE)


def compute_prefill_rate(engine: SimulatedEngine, lengths: LengthStatistics) -> float:
    """Prompts per second when every step is filled up to its token limit. Attention grows with each
    prompt's square for any chunks; the rest of the step time is shared."""
    timing = engine.timing
    max_tokens = engine.max_num_batched_tokens
    if engine.batching is not Batching.VLLM:
        max_tokens = max(max_tokens, lengths.longest_prompt)
    token_ms = _compute_least_token_ms(timing, max_tokens)
    prompt_ms = (
        token_ms * lengths.computed_tokens + timing.prompt_square_ms * lengths.computed_squares
    )
    return timing.stages * 1000.0 / prompt_ms


@functools.lru_cache(maxsize=1024)
def _compute_least_token_ms(timing: EngineTiming, max_tokens: int) -> float:
    """Time of a prompt token in the cheapest step of at most `max_tokens`, without attention."""
    return min(
        interpolate_table(timing.prompt_step, timing.prompt_ms, n) / n
        for n in _list_sizes(max_tokens)
    )


def compute_decode_rate(
    engine: SimulatedEngine, lengths: LengthStatistics, tpot_ms: float = math.inf
) -> float:
    """Requests per second that decode at the best batch size, in steps of at most `tpot_ms`.

    Without `tpot_ms` it is an upper bound. With it, it is the rate at which the mean step takes
    that long; attainment falls near it.
    """
    if lengths.decode_steps == 0:
        return math.inf
    timing = engine.timing
    context = lengths.own_context if math.isinf(tpot_ms) else lengths.decode_context
    in_memory = engine.kv_capacity_tokens / max(context, 1.0)
    max_batch = max(int(min(engine.max_num_seqs, in_memory) / timing.stages), 1)
    rows = np.array(_list_sizes(max_batch))
    step_ms = _compute_decode_ms(timing, rows, lengths.decode_context)
    rates = np.where(step_ms <= tpot_ms, rows / step_ms, 0.0)
    return timing.stages * 1000.0 * float(rates.max()) / lengths.decode_steps


def compute_unloaded_attainment(
    engine: SimulatedEngine, trace: Trace, ttft_ms: float, tpot_ms: float, first: int = 0
) -> float:
    """Share of the requests from number `first` on that would meet both targets if each had the
    instance to itself. An upper bound: other requests make a request faster only by what they leave
    in caches, all of which it is assumed to find. An infinite target is ignored."""
    is_met = np.ones(len(trace), dtype=np.bool_)
    if math.isfinite(ttft_ms):
        computed = trace.prompt_tokens - trace.bound_cached_tokens()
        longest = _find_longest_prompt_within(engine, computed, ttft_ms)
        is_met &= computed <= longest
    if math.isfinite(tpot_ms):
        mean_context = trace.prompt_tokens + (trace.output_tokens - 1) / 2
        alone = _compute_decode_ms(engine.timing, np.ones(1, dtype=np.int64), mean_context)
        is_met &= (alone <= tpot_ms) | (trace.output_tokens == 1)
    return float(is_met[first:].mean())


def _find_longest_prompt_within(
    engine: SimulatedEngine, prompt_tokens: NDArray[np.int64], ttft_ms: float
) -> int:
    """The longest of these prompts whose prefill alone takes at most `ttft_ms`; 0: none."""
    lengths = np.unique(prompt_tokens)
    position = bisect.bisect_right(
        range(len(lengths)),
        ttft_ms,
        key=lambda number: engine.timing.predict_prefill_ms([int(lengths[number])]),
    )
    return int(lengths[position - 1]) if position else 0


def _compute_decode_ms(
    timing: EngineTiming, rows: NDArray[np.int64], context: float | NDArray[np.float64]
) -> NDArray[np.float64]:
    """Time of decode steps with `rows` requests of `context` tokens each, with stage hops."""
    by_rows = np.array(timing.decode_context_ms)
    context_ms = by_rows[np.minimum(rows, len(by_rows) - 1)]
    fixed = np.array([interpolate_table(1.0, timing.decode_ms, int(row)) for row in rows])
    hops = (timing.stages - 1) * (timing.hop_ms + timing.hop_token_ms * rows)
    step_ms: NDArray[np.float64] = fixed + context_ms * rows * context + hops
    return step_ms


@functools.lru_cache(maxsize=1024)
def _list_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes from 1 to `largest`, in growing steps, both ends included."""
    sizes = [1]
    while sizes[-1] < largest:
        sizes.append(min(sizes[-1] + max(1, sizes[-1] // 16), largest))
    return tuple(sizes)
