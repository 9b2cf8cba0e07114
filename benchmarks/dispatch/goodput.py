"""Goodput per GPU of simulated fleets by policy: what the choice of an instance is worth.

Called by run.py. Decode batches, KV runs out, prompts interfere: all that the queues of queueing.py
leave out. Every policy serves the same requests; outputs are predicted as the router does it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import traces
from fleets import Worker

from cleave.policy.best_fit import BestFitModel
from cleave.simulator.fleet import Batching, DispatchPolicy, SimulatedFleet, SimulatedPool
from cleave.simulator.run import prepare_fleet, simulate
from cleave.simulator.trace import Trace

MOST_TOKENS = 4096
"""Longest context of the models here."""
WARM_UP = 0.2
PRECISION = 0.01
COMPARED = (
    DispatchPolicy.RANDOM,
    DispatchPolicy.ROUND_ROBIN,
    DispatchPolicy.LEAST_REQUESTS,
    DispatchPolicy.PENDING_TOKENS,
    DispatchPolicy.SHORTEST_WAIT,
    DispatchPolicy.POWER_OF_TWO,
    DispatchPolicy.LEAST_HEAVY,
    DispatchPolicy.BEST_FIT,
)


@dataclass(frozen=True, slots=True)
class Targets:
    ttft_ms: float
    tpot_ms: float
    attainment: float = 0.9


@dataclass(frozen=True, slots=True)
class Row:
    """One policy on one fleet."""

    fleet: str
    policy: str
    per_gpu: float
    """Goodput, req/s."""
    knowing: float
    """The same when outputs are known instead of predicted."""


def colocated(worker: Worker, instances: int, targets: Targets) -> SimulatedFleet:
    return SimulatedFleet(
        mixed=(SimulatedPool(worker.engine(), instances),),
        best_fit=BestFitModel(worker.coefficients, targets.ttft_ms, targets.tpot_ms),
    )


def split(worker: Worker, prefill: int, decode: int, targets: Targets) -> SimulatedFleet:
    return SimulatedFleet(
        prefill=(SimulatedPool(worker.engine(Batching.PREFILL_FIRST), prefill),),
        decode=(SimulatedPool(worker.engine(), decode),),
        transfer=worker.transfer,
        best_fit=BestFitModel(worker.coefficients, targets.ttft_ms, targets.tpot_ms),
    )


def compare(
    name: str, fleet: SimulatedFleet, gpus: int, lengths: Trace, targets: Targets, requests: int
) -> list[Row]:
    """A row for each policy."""
    rows = []
    for dispatch in COMPARED:
        candidate = replace(fleet, dispatch=dispatch)
        found = [
            find_goodput(candidate, lengths, targets, requests, knows) / gpus
            for knows in (False, True)
        ]
        rows.append(Row(name, dispatch.name, *found))
    return rows


def find_goodput(
    fleet: SimulatedFleet,
    lengths: Trace,
    targets: Targets,
    requests: int,
    knows: bool,
    seeds: int = 3,
) -> float:
    """Highest rate at which the targets hold, mean attainment of a few seeds."""
    prepared = prepare_fleet(fleet)

    def attainment(rate: float) -> float:
        shares = []
        for seed in range(seeds):
            trace = traces.draw(lengths, rate, requests, seed, MOST_TOKENS)
            if knows:
                trace = replace(trace, predicted_tokens=None)
            outcome = simulate(prepared, trace, seed)
            counted = slice(int(WARM_UP * requests), None)
            met = (outcome.ttft_ms <= targets.ttft_ms) & (outcome.tpot_ms <= targets.tpot_ms)
            shares.append(float(np.mean(met[counted])))
        return sum(shares) / seeds

    return bisect(lambda rate: attainment(rate) >= targets.attainment)


def bisect(holds: Callable[[float], bool], guess: float = 1.0) -> float:
    """The highest rate that holds, to PRECISION; 0: none above a thousandth of the guess."""
    low, high = 0.0, guess
    while holds(high):
        low, high = high, 2 * high
    while low == 0.0:
        middle = high / 2
        if middle < guess / 1000:
            return 0.0
        low, high = (middle, high) if holds(middle) else (0.0, middle)
    while high - low > PRECISION * high:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
