"""What flips alone could gain at most: for each phase the best split of the same instances.

Called by run.py. An oracle that knows each phase and changes roles at once, but starts nothing. The
instances of the first plan become prefill, mixed and decode ones in the counts that serve the phase
best; requests of earlier phases end elsewhere, as for the oracle that plans.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from cleave.api.deployment import Slo
from cleave.simulator.fleet import SimulatedEngine, SimulatedFleet, SimulatedPool
from cleave.simulator.run import simulate
from cleave.simulator.trace import Trace


def choose_split(fleet: SimulatedFleet, trace: Trace, slo: Slo) -> SimulatedFleet:
    """The split of the instances of `fleet` with the most requests of `trace` within `slo`."""

    def measure(split: SimulatedFleet) -> float:
        return simulate(split, trace).compute_attainment(slo.ttft_ms, slo.tpot_ms)

    return max(list_splits(fleet), key=measure)


def list_splits(fleet: SimulatedFleet) -> Iterator[SimulatedFleet]:
    """Every split that computes prompts and decodes; mixed instances run as decode ones do."""
    prefill, decode = fleet.prefill[0].engine, fleet.decode[0].engine
    count = fleet.prefill[0].replicas + fleet.decode[0].replicas
    for prefills in range(count + 1):
        for decodes in range(count + 1 - prefills):
            mixed = count - prefills - decodes
            if not mixed and not (prefills and decodes):
                continue
            yield replace(
                fleet,
                prefill=_build_pool(prefill, prefills),
                decode=_build_pool(decode, decodes),
                mixed=_build_pool(decode, mixed),
            )


def cut(trace: Trace, start_s: float, end_s: float) -> Trace:
    """The requests that arrive between two moments."""
    low, high = np.searchsorted(trace.arrival_ms, [start_s * 1_000, end_s * 1_000])
    some = slice(int(low), int(high))
    return Trace(trace.arrival_ms[some], trace.prompt_tokens[some], trace.output_tokens[some])


def _build_pool(engine: SimulatedEngine, replicas: int) -> tuple[SimulatedPool, ...]:
    return (SimulatedPool(engine, replicas),) if replicas else ()
