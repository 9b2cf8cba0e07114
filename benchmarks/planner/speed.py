"""Simulated requests per second of CPU time, by fleet, by number of GPUs and by number of requests.

Called by run.py. CPU time, since a busy machine stretches the wall's; on a quiet one both agree.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

from cleave.perf import named_profiles
from cleave.perf.published.distserve import FITS, KV_CAPACITY_TOKENS
from cleave.simulator.fleet import Batching, SimulatedEngine, SimulatedFleet, SimulatedPool
from cleave.simulator.run import simulate
from cleave.traffic.workload import Demand

MODEL = "opt-13b"
AMPLE_TOKENS = 1_000_000
LEAST_S = 0.2
"""A fleet is simulated again and again until it has taken this long."""
RATE_PER_PAIR = 4.0
"""Requests per second for each prefill and decode instance of OPT-13B: what they just hold."""


@dataclass(frozen=True, slots=True)
class Subject:
    """One fleet under one load."""

    name: str
    fleet: SimulatedFleet
    rate: float
    num_requests: int = 1000


def subjects() -> list[Subject]:
    """Fleets of OPT-13B on A100s, DistServe's coefficients."""
    whole = engine(MODEL, 1, 1)
    return [
        Subject("1P1D", pairs(1), RATE_PER_PAIR),
        Subject("2P2D", pairs(2), 2 * RATE_PER_PAIR),
        Subject("8P8D", pairs(8), 8 * RATE_PER_PAIR),
        Subject("decode alone", SimulatedFleet(decode=(SimulatedPool(whole, 1),)), RATE_PER_PAIR),
        Subject(
            "decode alone, 8 stages",
            SimulatedFleet(decode=(SimulatedPool(engine(MODEL, 1, 8), 1),)),
            4 * RATE_PER_PAIR,
        ),
        Subject(
            "mixed, chunked (vLLM)",
            SimulatedFleet(mixed=(SimulatedPool(whole, 1),)),
            RATE_PER_PAIR / 2,
        ),
        Subject(
            "mixed, prefill first",
            SimulatedFleet(mixed=(SimulatedPool(engine(MODEL, 1, 1, Batching.PREFILL_FIRST), 1),)),
            RATE_PER_PAIR / 2,
        ),
    ]


def growing_fleets() -> list[Subject]:
    """Half prefill, half decode instances of one GPU each; 20 requests per GPU, at least 1,000."""
    return [
        Subject(f"{gpus} GPUs", pairs(gpus // 2), gpus / 2 * RATE_PER_PAIR, max(1000, 20 * gpus))
        for gpus in (8, 32, 128, 512, 1024)
    ]


def growing_traces() -> list[Subject]:
    """1P1D and ever more requests."""
    return [
        Subject(f"{number:,} requests", pairs(1), RATE_PER_PAIR, number)
        for number in (1_000, 10_000, 100_000)
    ]


def requests_per_second(subject: Subject, demand: Demand) -> float:
    """Of CPU time, once compiled; the trace is drawn before."""
    trace = demand.draw(subject.num_requests, subject.rate)
    simulate(subject.fleet, trace)
    seconds, times = repeat(lambda: simulate(subject.fleet, trace))
    return subject.num_requests * times / seconds


def repeat(work: Callable[[], object]) -> tuple[float, int]:
    """CPU seconds and how often it ran."""
    started, times = time.process_time(), 0
    while time.process_time() - started < LEAST_S:
        work()
        times += 1
    return time.process_time() - started, times


def pairs(number: int) -> SimulatedFleet:
    """As many prefill as decode instances, one GPU each."""
    whole = engine(MODEL, 1, 1)
    return SimulatedFleet(
        prefill=(SimulatedPool(whole, number),), decode=(SimulatedPool(whole, number),)
    )


def engine(
    model: str, tensor_parallel_size: int, stages: int, batching: Batching = Batching.VLLM
) -> SimulatedEngine:
    """On A100-80G, DistServe's coefficients."""
    fit = FITS[f"distserve/{model}/tp{tensor_parallel_size}"]
    return SimulatedEngine(
        timing=named_profiles.to_timing(fit, stages),
        kv_capacity_tokens=KV_CAPACITY_TOKENS[model][tensor_parallel_size, stages],
        batching=batching,
        max_num_seqs=256 * stages,
    )
