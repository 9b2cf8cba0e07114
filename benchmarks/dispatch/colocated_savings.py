"""Fewest GPUs of mixed instances that keep both targets, by policy and worker (Aladdin, figure 11).

Called by run.py. Requests with ShareGPT's lengths, outputs predicted as the router does it. The
paper compares vLLM's default, one worker on all four GPUs of a machine, and the best worker with
the shortest queue, with Aladdin's placement on the best worker. What is hard: vLLM of the paper
computed whole prompts first, so one long prompt stops the decoding of a whole worker, while today's
computes chunks beside them; both are measured.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import traces
from fleets import Worker
from goodput import MOST_TOKENS

from cleave.policy.best_fit import BestFitModel
from cleave.simulator.fleet import Batching, DispatchPolicy, SimulatedFleet, SimulatedPool
from cleave.simulator.run import simulate
from cleave.simulator.trace import Trace
from cleave.traffic import published

BATCHINGS = {"whole prompts first": Batching.PREFILL_FIRST, "chunks": Batching.VLLM}
PROMPT_BUDGETS = {Batching.PREFILL_FIRST: MOST_TOKENS, Batching.VLLM: 2048}
"""Most tokens of an iteration: a whole prompt has to fit."""
SHARES = 1.0, 0.99
MAX_WORKERS = 128


@dataclass(frozen=True, slots=True)
class Row:
    """Fewest GPUs at one rate; 0: no number of workers is enough."""

    worker: str
    batching: str
    rate: float
    share: float
    """Of the requests, that keep both targets; the paper's figure asks for all of them."""
    default: int
    """Workers of four GPUs, least requests: vLLM's default in the paper."""
    shortest_queue: int
    """The best worker, least requests."""
    cleave: int
    """The same, Cleave's default policy."""
    best_fit: int
    """The same, best fit."""
    best_fit_known: int
    """The same, if the router knew the outputs."""


def compare(
    best: Worker, default: Worker, rate: float, ttft_ms: float, tpot_ms: float, requests: int
) -> Iterator[Row]:
    """Every batching and share at one rate; `best` and `default`: workers of the same model."""
    trace = draw(rate, requests)
    for name, batching in BATCHINGS.items():
        for share in SHARES:

            def count(
                worker: Worker,
                dispatch: DispatchPolicy,
                served: Trace = trace,
                batching: Batching = batching,
                share: float = share,
            ) -> int:
                limits = BestFitModel(worker.coefficients, ttft_ms, tpot_ms)
                fleet = SimulatedFleet(dispatch=dispatch, best_fit=limits)
                return worker.gpus * count_workers(fleet, worker, batching, served, share)

            yield Row(
                best.name,
                name,
                rate,
                share,
                count(default, DispatchPolicy.LEAST_REQUESTS),
                count(best, DispatchPolicy.LEAST_REQUESTS),
                count(best, DispatchPolicy.PREFIX_AWARE),
                count(best, DispatchPolicy.BEST_FIT),
                count(best, DispatchPolicy.BEST_FIT, replace(trace, predicted_tokens=None)),
            )


def draw(rate: float, requests: int, seed: int = 1) -> Trace:
    """Requests of ShareGPT's lengths with Poisson arrivals."""
    trace = published.get_workload("sharegpt").build_demand().draw(requests, rate, seed)
    return replace(trace, predicted_tokens=traces.predict(trace.prompt_tokens, trace.output_tokens))


def count_workers(
    fleet: SimulatedFleet, worker: Worker, batching: Batching, trace: Trace, share: float
) -> int:
    """Fewest workers with which `share` of the requests keep the targets of `fleet.best_fit`; 0:
    not even `MAX_WORKERS` are enough."""
    limits = fleet.best_fit
    assert limits is not None
    engine = worker.engine(batching, PROMPT_BUDGETS[batching])

    def holds(count: int) -> bool:
        outcome = simulate(replace(fleet, mixed=(SimulatedPool(engine, count),)), trace, 1)
        is_met = (outcome.ttft_ms <= limits.ttft_ms) & (outcome.tpot_ms <= limits.tpot_ms)
        return float(np.mean(is_met)) >= share

    high = 1
    while not holds(high):
        high *= 2
        if high > MAX_WORKERS:
            return 0
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
