"""Simulates given pools: those of a plan, or those of spec.placement.manual.

Called by `cleave simulate` and the report; the search simulates its own placements. All runs serve
the requests of one seed, so plans and rates can be compared.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from cleave.api.role import Role
from cleave.perf.hardware.gpu import UnknownGpuError, find_gpu
from cleave.planner.placement import PlanError
from cleave.planner.plan import EMULATED_GPU, LOW_AFFINITY, Plan, PlannedPool
from cleave.planner.problem import Problem
from cleave.planner.search import candidates
from cleave.planner.search.candidate_placement import (
    CandidatePlacement,
    InstanceGroup,
    build_deployed_cell,
    build_transfer,
)
from cleave.planner.search.candidates import Candidate, PlannedInstance
from cleave.planner.search.trials import Targets, Trials
from cleave.simulator.fleet import Batching, SimulatedFleet
from cleave.simulator.outcome import SimulationResult, Times
from cleave.simulator.run import simulate

_MAX_BLOCKS = 20_000_000
"""Most blocks in the prompts of a simulation: up to 2.4 GB."""


@dataclass(frozen=True, slots=True)
class PlacementSimulator:
    """Simulates fleets under the demand of one problem."""

    problem: Problem
    num_requests: int = 2000
    is_least: bool = False
    """Whether there are more where trials at the rate have more: fleets begin empty, and few
    requests do not show that a large one is too small."""

    def check_memory(self) -> None:
        """Raise PlanError where so many prompts that repeat would take too much memory."""
        per_prompt = self.problem.demand.blocks_per_prompt
        if self.num_requests * per_prompt > _MAX_BLOCKS:
            fault = (
                f"--requests {self.num_requests}: prompts that repeat are simulated in blocks, "
                f"{per_prompt:.0f} each here; at most {int(_MAX_BLOCKS / per_prompt)} requests"
            )
            raise PlanError([fault])

    def simulate_plan(self, plan: Plan, rate: float) -> SimulationResult:
        """Simulate the plan at `rate` req/s; a plan of cells as one cell at its share of it."""
        placement = to_candidate_placement(self.problem, plan.pools, plan.algorithm, plan.cells)
        fleet = build_deployed_cell(self.problem, placement, plan.whole_below_tokens)
        return self.simulate(fleet, rate / placement.copies)

    def simulate(self, served: SimulatedFleet, rate: float) -> SimulationResult:
        """Simulate any fleet at `rate` req/s."""
        problem, number = self.problem, self.num_requests
        if self.is_least:
            span = Trials(problem.demand).compute_span(rate, Targets.from_slo(problem.slo))
            number = max(number, span.total)
        return simulate(served, problem.demand.draw(number, rate, problem.seed), problem.seed)


def build_fleet(problem: Problem, pools: Iterable[PlannedPool]) -> SimulatedFleet:
    """All instances of `pools` and the links between them, as a simulator fleet. Raises PlanError
    when the model does not run with a pool's parallelism."""
    pools = tuple(pools)
    placement = to_candidate_placement(problem, pools)
    fleet = build_deployed_cell(problem, placement, 0)
    counts = {pool.replicas // (pool.per_cell or pool.replicas + 1) for pool in pools}
    if len(counts) > 1 or 0 in counts:
        return fleet
    (copies,) = counts
    cell = tuple(replace(g, replicas=g.replicas // copies) for g in placement.groups)
    within = CandidatePlacement(cell, copies, is_in_node=True)
    return replace(fleet, transfer=build_transfer(problem, within))


def compute_mfu(problem: Problem, pools: Iterable[PlannedPool], outcome: SimulationResult) -> Times:
    """Model FLOPs utilisation of each engine of `build_fleet(problem, pools)`; nan: unknown."""
    peaks = [
        (group.instance.candidate.estimate.peak_flops or math.nan) / group.instance.engine.ranks
        for group in to_candidate_placement(problem, pools).groups
        for _ in range(group.replicas * group.instance.engine.ranks)
    ]
    return outcome.instances.compute_mfu(problem.shape.flops_per_token, np.array(peaks))


def to_candidate_placement(
    problem: Problem, pools: Iterable[PlannedPool], algorithm: str = "", cells: int = 1
) -> CandidatePlacement:
    """Convert pools to the search's type, divided into `cells`; those of Algorithm 2 to cells that
    lie in one node each. Raises PlanError when the model does not run with a pool's parallelism."""
    pools = tuple(pools)
    groups = [
        InstanceGroup(pool.role, _build_instance(problem, pool), pool.replicas)
        for pool in sorted(pools, key=lambda pool: list(Role).index(pool.role))
    ]
    is_in_node = algorithm.startswith(LOW_AFFINITY)
    declared = (pool.replicas // pool.per_cell for pool in pools if pool.per_cell)
    copies = math.gcd(
        *(group.replicas for group in groups), *(declared if is_in_node else (cells,))
    )
    cell = tuple(replace(group, replicas=group.replicas // copies) for group in groups)
    return CandidatePlacement(cell, copies, is_in_node)


def _build_instance(problem: Problem, pool: PlannedPool) -> PlannedInstance:
    kinds = {supply.gpu: supply for supply in problem.supplies}
    gpu = _resolve_gpu(pool, list(kinds))
    size = pool.parallelism
    estimate = candidates.estimate_size(problem, gpu, size)
    if estimate is None:
        why = candidates.explain_unsupported(problem, gpu, size)
        raise PlanError([f"spec.placement.manual: {pool.role}: {why}"])
    return PlannedInstance(
        candidate=Candidate(kinds[gpu], size, estimate),
        batching=Batching[pool.batching] if pool.batching else Batching.VLLM,
        max_num_seqs=pool.max_num_seqs or candidates.MAX_NUM_SEQS,
        max_num_batched_tokens=pool.max_num_batched_tokens or candidates.MAX_NUM_BATCHED_TOKENS,
        policies=problem.policies.for_role(pool.role),
        slo=problem.slo,
    ).with_limits()


def _resolve_gpu(pool: PlannedPool, kinds: list[str]) -> str:
    """The estimator's name of the pool's GPU type. Raises PlanError."""
    if kinds == [EMULATED_GPU]:
        return EMULATED_GPU
    field = f"spec.placement.manual: {pool.role}: gpu"
    if pool.gpu is None:
        if len(kinds) > 1:
            raise PlanError([f"{field}: set one of {', '.join(kinds)}"])
        return kinds[0]
    if pool.gpu in kinds:
        return pool.gpu
    try:
        gpu = find_gpu(pool.gpu).name
    except UnknownGpuError as error:
        raise PlanError([f"{field}: {error}"]) from error
    if gpu not in kinds:
        raise PlanError([f"{field}: the nodes have no {gpu}, only {', '.join(kinds)}"])
    return gpu
