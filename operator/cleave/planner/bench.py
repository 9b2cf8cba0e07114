"""Simulates pools that somebody has chosen: a plan of the answer, or a placement by hand.

Called by `cleave simulate` and the report; the search simulates its own drafts. All requests of a
run are those of one seed, so plans and rates can be compared.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cleave.api.engine import Engine
from cleave.api.role import Role
from cleave.planner.candidates import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, Candidate, Instance
from cleave.planner.draft import Draft, Group, cell_fleet
from cleave.planner.placement import PlanError
from cleave.planner.plan import Plan, PlannedPool
from cleave.planner.problem import Problem
from cleave.simulator.fleet import Batching, Fleet
from cleave.simulator.outcome import Outcome
from cleave.simulator.run import simulate

_IN_NODE = "Algorithm 2"


@dataclass(frozen=True, slots=True)
class Bench:
    """Serves requests of one problem's demand."""

    problem: Problem
    num_requests: int = 2000

    def serve(self, plan: Plan, rate: float) -> Outcome:
        """The plan at `rate` req/s; where instances stay together, one cell at its share."""
        cells = _cells(plan)
        pools = [replace(pool, replicas=pool.replicas // cells) for pool in plan.pools]
        return self.run(fleet(self.problem, pools, plan.algorithm), rate / cells)

    def run(self, served: Fleet, rate: float) -> Outcome:
        """Any fleet at `rate` req/s."""
        seed = self.problem.seed
        return simulate(served, self.problem.demand.draw(self.num_requests, rate, seed), seed)


def fleet(problem: Problem, pools: Iterable[PlannedPool], algorithm: str = "") -> Fleet:
    """The instances of `pools` and the links between them, as the simulator takes them.

    Raises PlanError when the model does not run with a pool's parallelism.
    """
    groups = tuple(
        Group(pool.role, _instance(problem, pool), pool.replicas)
        for pool in sorted(pools, key=lambda pool: list(Role).index(pool.role))
    )
    return cell_fleet(problem, Draft(groups, is_in_node=algorithm.startswith(_IN_NODE)))


def limited(pools: Iterable[PlannedPool], engine: Engine) -> tuple[PlannedPool, ...]:
    """The pools with the limits of a pass that the engine's arguments state, as its pods run them.

    Raises PlanError when such an argument is no number.
    """
    seqs, tokens = _limit(engine, "--max-num-seqs"), _limit(engine, "--max-num-batched-tokens")
    return tuple(
        replace(
            pool,
            max_num_seqs=seqs or pool.max_num_seqs,
            max_num_batched_tokens=tokens or pool.max_num_batched_tokens,
        )
        for pool in pools
    )


def _limit(engine: Engine, flag: str) -> int | None:
    value = engine.value_of(flag)
    if value is None:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise PlanError([f"spec.engine.args: {flag} {value}: must be a whole number above 0"])
    return int(value)


def _cells(plan: Plan) -> int:
    """Alike groups of prefill and decode instances that hand over among themselves alone."""
    if not plan.algorithm.startswith(_IN_NODE):
        return 1
    return math.gcd(*(pool.replicas for pool in plan.pools))


def _instance(problem: Problem, pool: PlannedPool) -> Instance:
    return Instance(
        candidate=_candidate(problem, pool),
        batching=Batching[pool.batching] if pool.batching else Batching.VLLM,
        max_num_seqs=pool.max_num_seqs or MAX_NUM_SEQS,
        max_num_batched_tokens=pool.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS,
        kv_block_size=problem.policies.kv_block_size,
    )


def _candidate(problem: Problem, pool: PlannedPool) -> Candidate:
    kinds = {supply.gpu: supply for supply in problem.supplies}
    if pool.gpu is None and len(kinds) > 1:
        raise PlanError(
            [f"spec.planning.gpus: name the one kind of GPU to use; there are {', '.join(kinds)}"]
        )
    gpu = pool.gpu or next(iter(kinds))
    size = pool.parallelism
    estimate = problem.estimator.estimate(gpu, size.tensor, size.pipeline)
    if estimate is None:
        why = problem.estimator.why_not(gpu, size.tensor, size.pipeline)
        raise PlanError([f"spec.placement.manual: {pool.role}: {why}"])
    return Candidate(kinds[gpu], size, estimate)
