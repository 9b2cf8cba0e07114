"""Random planning problems on a few GPUs, what the search chooses, and all placements there are."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from cleave.api.deployment import Slo
from cleave.api.planning import Affinity, Disaggregation, Planning
from cleave.planner.problem import DISTSERVE_POLICIES, Policies, Problem
from cleave.planner.search import colocated, enumeration, goodput, high_affinity, low_affinity
from cleave.planner.search.candidate_placement import (
    CandidatePlacement,
    build_cell,
    build_deployed_cell,
    describe,
)
from cleave.planner.search.candidates import list_candidates
from cleave.planner.search.context import SearchContext
from cleave.planner.search.low_affinity import UNLIMITED
from cleave.planner.search.packing import count_copies, has_room
from cleave.planner.search.trials import CONFIRMATION_PRECISION
from cleave.policy.role_flipping import build_thresholds

from tests.support import known_problems

MARGIN = 0.015
"""Trials of 10,000 requests differ by this much in attainment between samples ..."""
_GOODPUT_MARGIN = 0.05
"""... and by this much in goodput."""
_SAMPLES = 3
"""Samples of requests whose mean decides whether a smaller placement serves the rate."""


@dataclass(frozen=True)
class Choice:
    """What the search would select, with its goodput in long trials; None: nothing serves."""

    placement: CandidatePlacement | None
    gpus: float
    goodput: float

    def __str__(self) -> str:
        """Without the instances' timings."""
        name = describe(self.placement) if self.placement else "nothing"
        return f"{name}, {self.gpus} GPUs, {self.goodput:.2f} req/s"


def draw_problem(number: int) -> Problem:
    """The problem of this number: lengths, rate, targets, network and policies at random; of odd
    numbers with roles that flip."""
    rng = np.random.default_rng(number)
    prompt, output = rng.uniform(100, 900), rng.uniform(20, 300)
    rate = float(np.exp(rng.uniform(np.log(1), np.log(25))))
    slo = Slo(
        ttft_ms=round(float(np.exp(rng.uniform(np.log(120), np.log(1500))))),
        tpot_ms=round(float(np.exp(rng.uniform(np.log(22), np.log(120))))),
        attainment=float(rng.choice([0.9, 0.9, 0.95, 0.99])),
    )
    is_slow = bool(rng.integers(2))
    network = known_problems.SLOW_NETWORK if is_slow else known_problems.INFINIBAND
    num_gpus = int(rng.choice([4, 8]))
    policies = Policies() if rng.integers(2) else DISTSERVE_POLICIES
    flipping = build_thresholds(slo.ttft_ms) if number % 2 else None
    return known_problems.problem(
        known_problems.chat(rate, prompt, output),
        slo,
        supplies=(known_problems.nodes(1, network, num_gpus),),
        policies=replace(policies, flipping=flipping),
        planning=Planning(affinity=Affinity.LOW if is_slow else Affinity.HIGH),
    )


def draw_problem_with_own_targets(number: int) -> Problem:
    """The problem of this number with a target for gaps, for TPOT alone, for TTFT alone, in turn;
    of every fourth number with all three."""
    rng, problem = np.random.default_rng(number), draw_problem(number)
    slo, kind = problem.slo, number % 4
    above = 1 - (1 - slo.attainment) * float(rng.choice([0.2, 0.5]))
    own: dict[str, float] = {}
    if kind in (0, 3):
        own["itl_p99_ms"] = round(slo.tpot_ms * float(np.exp(rng.uniform(0.0, 1.5))))
    if kind in (1, 3):
        own["tpot_attainment"] = above
    if kind in (2, 3):
        own["ttft_attainment"] = above
    return replace(problem, slo=slo.model_copy(update=own))


def draw_large_problem(number: int, part_gpus: int) -> Problem:
    """The problem of this number at a rate for several parts of so many GPUs, on nodes for 5 to 11.
    Those of every third number may be disaggregated, which takes longer to plan."""
    rng, few = np.random.default_rng(number), draw_problem(number)
    kinds = Disaggregation.AUTO if number % 3 == 0 else Disaggregation.NEVER
    planning = few.planning.model_copy(update={"disaggregation": kinds})
    few = replace(few, planning=planning, max_nodes_per_instance=1)
    (supply,), chosen = few.supplies, choose(few)
    num_nodes = int(rng.integers(5 * part_gpus // 8, 12 * part_gpus // 8))
    per_gpu = chosen.goodput / chosen.gpus if chosen.placement else 1.0
    demand = few.demand.with_rate(per_gpu * float(rng.uniform(2 * part_gpus, 8 * num_nodes)))
    nodes = known_problems.nodes(num_nodes, supply.network_link)
    return replace(few, demand=demand, supplies=(nodes,))


def choose(problem: Problem) -> Choice:
    """The smallest placement of all algorithms, with most goodput among equals."""
    search = SearchContext.from_problem(problem)
    options = enumeration.enumerate_placements(
        search, list_candidates(problem), problem.planning.affinity
    )
    held = [each.placement for each in options if each.holds_rate]
    if not held:
        return Choice(None, float("inf"), 0.0)
    least = min(each.gpus for each in held)
    rates = {each: measure_goodput(search, each) for each in held if each.gpus == least}
    best = max(rates, key=rates.__getitem__)
    return Choice(best, least, rates[best])


def measure_goodput(search: SearchContext, placement: CandidatePlacement) -> float:
    """Of all cells, in long trials."""
    trials = search.trials.with_precision(CONFIRMATION_PRECISION)
    fleet = build_deployed_cell(search.problem, placement, 0)
    return placement.copies * goodput.find_goodput(trials, fleet, search.targets).rate


def measure_share(search: SearchContext, placement: CandidatePlacement) -> float:
    """Share of requests in time at the rate, in a long trial."""
    trials, rate = search.trials.with_precision(CONFIRMATION_PRECISION), search.problem.rate
    fleet, rate = build_deployed_cell(search.problem, placement, 0), rate / placement.copies
    span = trials.compute_span(rate, search.targets)
    return trials.measure_shares(fleet, rate, search.targets, span).both


def _measure_mean_share(problem: Problem, placement: CandidatePlacement) -> float:
    """The same over several samples."""
    problems = (replace(problem, seed=problem.seed + number) for number in range(_SAMPLES))
    return fmean(measure_share(SearchContext.from_problem(each), placement) for each in problems)


def list_all(problem: Problem, max_gpus: int) -> Iterator[CandidatePlacement]:
    """Every placement with at most so many GPUs: sizes, numbers and cells, with default limits."""
    search, found = SearchContext.from_problem(problem), list_candidates(problem)
    for unit in colocated.list_instances(problem, found):
        for copies in range(1, count_copies(problem, unit) + 1):
            yield CandidatePlacement(tuple(replace(g, replicas=copies) for g in unit.groups))
    if problem.planning.affinity is Affinity.LOW:
        for cell in low_affinity.list_configurations(problem, found, UNLIMITED):
            for copies in range(1, min(max_gpus // cell.gpus, count_copies(problem, cell)) + 1):
                yield cell.with_copies(copies)
        return
    for unit in high_affinity.list_units(search, found):
        for numbers in itertools.product(range(max_gpus), repeat=2):
            added = zip(unit.groups, numbers, strict=True)
            placement = unit.change_replicas({group.role: number for group, number in added})
            if placement.gpus <= max_gpus and has_room(problem, placement):
                yield placement


def loosen(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """The problem with one thing made easier, each with a name."""
    slo, (supply,) = problem.slo, problem.supplies
    yield "TTFT", replace(problem, slo=slo.model_copy(update={"ttft_ms": 1.3 * slo.ttft_ms}))
    yield "TPOT", replace(problem, slo=slo.model_copy(update={"tpot_ms": 1.2 * slo.tpot_ms}))
    if slo.itl_p99_ms:
        for name, itl_ms in (("ITL", 1.3 * slo.itl_p99_ms), ("no ITL", None)):
            looser = slo.model_copy(update={"itl_p99_ms": itl_ms})
            yield name, replace(problem, slo=looser)
    for name in ("ttft_attainment", "tpot_attainment"):
        if getattr(slo, name):
            yield f"no {name}", replace(problem, slo=slo.model_copy(update={name: None}))
    yield "rate", replace(problem, demand=problem.demand.with_rate(0.8 * problem.rate))
    max_gpus = supply.max_gpus + supply.gpus_per_node
    more = replace(supply, num_nodes=supply.num_nodes + 1, max_gpus=max_gpus)
    yield "GPUs", replace(problem, supplies=(more,))
    fast = replace(supply.network_link, gb_per_s=2 * supply.network_link.gb_per_s)
    yield "link", replace(problem, supplies=(replace(supply, network_link=fast),))


def is_worse(other: Choice, chosen: Choice, problem: Problem) -> bool:
    """Whether `other`, of a looser problem, takes more or serves less than `chosen` beyond what
    trials may err."""
    if chosen.placement is None or other.gpus < chosen.gpus:
        return False
    if other.gpus == chosen.gpus:
        return other.goodput < chosen.goodput * (1 - _GOODPUT_MARGIN)
    share = measure_share(SearchContext.from_problem(problem), chosen.placement)
    return share > problem.slo.attainment + MARGIN


def list_better(problem: Problem, chosen: Choice, max_gpus: int = 8) -> Iterator[str]:
    """Placements that serve the rate with fewer GPUs than the chosen one, or as many and more
    goodput, beyond what trials may err."""
    search = SearchContext.from_problem(problem)
    for placement in list_all(problem, int(min(max_gpus, chosen.gpus))):
        if not goodput.can_meet_targets(
            search.trials, build_cell(problem, placement), search.targets
        ):
            continue
        share = measure_share(search, placement)
        if placement.gpus < chosen.gpus and share > problem.slo.attainment + MARGIN:
            # Instances that are short of memory serve one sample of requests in time and another
            # one hardly half: a plan holds by the mean.
            share = _measure_mean_share(problem, placement)
            if share > problem.slo.attainment + MARGIN:
                yield f"{describe(placement)}: {share:.3f} in time, against {chosen}"
        elif share > problem.slo.attainment and placement.gpus == chosen.gpus:
            rate = measure_goodput(search, placement)
            if rate * (1 - _GOODPUT_MARGIN) > chosen.goodput:
                yield f"{describe(placement)}: {rate:.2f} req/s, against {chosen}"
