"""How many requests a trial needs: goodput of one pair of instances, by the length of the trace.

Called by run.py. simdistserve simulates 300 requests at any rate; `search.trials` fills the
fleet first, counts at least so many requests and simulates the longer, the higher the rate.
"""

from dataclasses import dataclass

from testbeds import pose

from cleave.api.role import Role
from cleave.planner.problem import Problem
from cleave.planner.search import goodput
from cleave.planner.search.candidate_placement import CandidatePlacement, InstanceGroup, build_cell
from cleave.planner.search.candidates import Candidate, build_decode, build_prefill, list_candidates
from cleave.planner.search.trials import CONFIRMATION_PRECISION, Precision, Targets, Trials
from cleave.simulator.fleet import SimulatedFleet
from cleave.simulator.run import simulate
from cleave.traffic import published

TARGETS = Targets(200.0, 100.0, 0.9)
COUNTS = (100, 300, 1_000, 3_000, 10_000, 30_000)
SEEDS = range(5)
GPUS = 3
HIGHEST = 10.0
"""Requests per second and GPU, where bisections begin."""
TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class Row:
    """Goodput per GPU with traces of one length, mean, least and most over the seeds."""

    num_requests: int
    fixed: tuple[float, float, float]
    """So many requests from an empty fleet, all counted, as simdistserve does."""
    ours: tuple[float, float, float]
    """At least so many counted."""


def compare() -> list[Row]:
    """Prefill on two GPUs, decode on one: the paper's placement for OPT-13B on ShareGPT."""
    question = pose("opt-13b", published.get_workload("sharegpt").build_demand(), TARGETS)
    fleet = _fleet(question)
    return [
        Row(
            count,
            _spread([_fixed(question, fleet, count, seed) for seed in SEEDS]),
            _spread([_ours(question, fleet, count, seed) for seed in SEEDS]),
        )
        for count in COUNTS
    ]


def _fleet(question: Problem) -> SimulatedFleet:
    found = list_candidates(question)
    prefill = build_prefill(question, _sized(found, 2))
    decode = build_decode(question, _sized(found, 1))
    groups = (InstanceGroup(Role.PREFILL, prefill, 1), InstanceGroup(Role.DECODE, decode, 1))
    return build_cell(question, CandidatePlacement(groups, is_in_node=True))


def _sized(found: tuple[Candidate, ...], tensor: int) -> Candidate:
    return next(
        each
        for each in found
        if (each.parallelism.tensor, each.parallelism.pipeline) == (tensor, 1)
    )


def _fixed(question: Problem, fleet: SimulatedFleet, count: int, seed: int) -> float:
    def holds(rate: float) -> bool:
        outcome = simulate(fleet, question.demand.draw(count, rate, seed))
        return outcome.compute_attainment(TARGETS.ttft_ms, TARGETS.tpot_ms) >= TARGETS.attainment

    low, high = 0.0, HIGHEST * GPUS
    while high - low > TOLERANCE * high:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low / GPUS


def _ours(question: Problem, fleet: SimulatedFleet, count: int, seed: int) -> float:
    trials = Trials(question.demand, seed, Precision(count, CONFIRMATION_PRECISION.lifetimes))
    return goodput.find_goodput(trials, fleet, TARGETS).rate / GPUS


def _spread(values: list[float]) -> tuple[float, float, float]:
    return sum(values) / len(values), min(values), max(values)
