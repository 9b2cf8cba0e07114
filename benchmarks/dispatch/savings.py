"""Fewest decode instances that keep every request's TPOT, by policy (Aladdin, figure 12).

Called by run.py. Requests arrive with their prompts computed, as in the paper's split-phase
simulation, and all of them (P100) must decode within the target on average, without having waited
for room in the KV cache.
"""

from dataclasses import dataclass, replace

import numpy as np
import traces
from fleets import Worker
from goodput import MOST_TOKENS

from cleave.policy.best_fit import BestFitModel
from cleave.simulator.fleet import DispatchPolicy, SimulatedFleet, SimulatedPool
from cleave.simulator.run import simulate
from cleave.simulator.trace import Trace

COMPARED = (
    DispatchPolicy.LEAST_REQUESTS,
    DispatchPolicy.POWER_OF_TWO,
    DispatchPolicy.PENDING_TOKENS,
    DispatchPolicy.LEAST_HEAVY,
    DispatchPolicy.BEST_FIT,
)


@dataclass(frozen=True, slots=True)
class Row:
    """Fewest instances at one rate, by policy; outputs predicted, then known."""

    rate: float
    predicted: dict[str, int]
    known: dict[str, int]


def count_at(
    worker: Worker, lengths: Trace, rate: float, tpot_ms: float, requests: int, share: float
) -> Row:
    """`share` of the requests must keep the target; the paper's figure asks for all of them."""
    trace = traces.draw(lengths, rate, requests, 1, MOST_TOKENS)
    oracle = replace(trace, predicted_tokens=None)

    def fewest(dispatch: DispatchPolicy, served: Trace) -> int:
        fleet = SimulatedFleet(
            dispatch=dispatch,
            first_token_by_decode=False,
            best_fit=BestFitModel(worker.coefficients, float("inf"), tpot_ms),
        )

        def holds(count: int) -> bool:
            outcome = simulate(
                replace(fleet, decode=(SimulatedPool(worker.engine(), count),)), served, 1
            )
            passes = np.maximum(outcome.output_tokens - 1, 1)
            waited = outcome.decode_start_ms - outcome.arrival_ms
            mean_ms = (outcome.end_ms - outcome.decode_start_ms) / passes
            # Two passes: the one under way, and one whose KV arrives.
            met = (mean_ms <= tpot_ms) & (waited <= 2 * tpot_ms) | (outcome.output_tokens == 1)
            return float(np.mean(met)) >= share

        high = 1
        while not holds(high):
            high *= 2
            if high > 4096:
                return 0
        low = high // 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle, high)
        return high

    return Row(
        rate,
        {each.name: fewest(each, trace) for each in COMPARED},
        {each.name: fewest(each, oracle) for each in COMPARED},
    )
