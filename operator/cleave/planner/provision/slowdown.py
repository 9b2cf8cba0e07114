"""Latency targets as slowdowns: latency relative to an unloaded reference machine.

Splitwise, section V-B and table VI: nine targets (P50, P90, P99 of TTFT, time between tokens and
end to end). They suit any mix of lengths, where no single target in milliseconds does. Used by
`search`.
"""

from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import NDArray

from cleave.perf.timing import EngineTiming
from cleave.planner.plan import Percentiles
from cleave.planner.result.simulation_summary import compute_percentiles
from cleave.simulator.outcome import SimulationResult
from cleave.simulator.trace import Trace

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Slowdowns:
    """Latency divided by that of the same request on the unloaded reference machine; 1: equal."""

    ttft: Percentiles
    tpot: Percentiles
    """Mean gap between a request's tokens; requests of one token have none."""
    e2e: Percentiles

    def is_within(self, limits: "Slowdowns") -> bool:
        """Whether all nine are at most their limits."""
        return bool(np.all(np.array(astuple(self)) <= np.array(astuple(limits))))


SPLITWISE_TABLE_VI = Slowdowns(
    ttft=Percentiles(2.0, 3.0, 6.0),
    tpot=Percentiles(1.25, 1.5, 5.0),
    e2e=Percentiles(1.25, 1.5, 5.0),
)
"""Splitwise's targets, against a DGX-A100."""


@dataclass(frozen=True, slots=True, eq=False)
class UnloadedLatencies:
    """Latencies of each request on an otherwise idle reference machine, in ms."""

    ttft_ms: Values
    tpot_ms: Values
    e2e_ms: Values


def compute_unloaded_latencies(reference: EngineTiming, trace: Trace) -> UnloadedLatencies:
    """One prefill step, then decode steps of one request."""
    prompts, index = np.unique(trace.prompt_tokens, return_inverse=True)
    ttft_ms = np.array([reference.predict_prefill_ms([n]) for n in prompts.tolist()])[index]
    gaps = trace.output_tokens - 1
    # Step time is linear in the context, so the mean step is the one in the middle.
    first = reference.predict_decode_ms(1, 0)
    context_ms = reference.predict_decode_ms(1, 1) - first
    tpot_ms = first + context_ms * (trace.prompt_tokens + (gaps + 1) / 2)
    return UnloadedLatencies(ttft_ms, tpot_ms, ttft_ms + gaps * tpot_ms)


def measure_slowdowns(
    outcome: SimulationResult, reference: UnloadedLatencies, window: slice = slice(None)
) -> Slowdowns:
    """Slowdowns of the requests in `window`, at least one; an unfinished one is infinitely slow."""
    e2e_ms = outcome.end_ms - outcome.arrival_ms
    gaps = (outcome.tpot_ms / reference.tpot_ms)[window][outcome.output_tokens[window] > 1]
    return Slowdowns(
        compute_percentiles((outcome.ttft_ms / reference.ttft_ms)[window]),
        compute_percentiles(gaps) if len(gaps) else Percentiles(0.0, 0.0, 0.0),
        compute_percentiles((e2e_ms / reference.e2e_ms)[window]),
    )
