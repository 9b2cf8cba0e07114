"""Every way to spread one instance over the GPUs that there are, and the engine that results.

The loops of DistServe's Algorithm 1 (section 4.1): tensor parallel sizes within a node, pipeline
stages across nodes; the estimator says which of them fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cleave.api.planning import Objective
from cleave.api.role import Parallelism
from cleave.perf.estimate import Estimate
from cleave.planner.problem import Policies, Problem, Supply
from cleave.simulator.fleet import Batching, Engine

MAX_NUM_SEQS = 256
"""vLLM's default limit of requests in one pass, where no search has set another."""
DECODE_NUM_SEQS = 1024
"""The same where instances only decode: what limits a batch is then memory and the TPOT target."""
MAX_NUM_BATCHED_TOKENS = 2048
"""vLLM's default token budget when it serves online."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One model on one kind of GPU with one parallelism."""

    supply: Supply
    parallelism: Parallelism
    estimate: Estimate

    @property
    def gpus(self) -> int:
        """GPUs of one instance."""
        return self.parallelism.gpus

    def resources(self, objective: Objective) -> float:
        """What one instance takes of what the objective counts: GPUs, price of an hour, watts."""
        match objective:
            case Objective.COST:
                return self.estimate.cost_per_hour
            case Objective.POWER:
                return self.estimate.power_watts
            case Objective.GOODPUT_PER_GPU:
                return float(self.gpus)


@dataclass(frozen=True, slots=True)
class Instance:
    """A candidate together with how its engine batches."""

    candidate: Candidate
    batching: Batching
    max_num_seqs: int
    max_num_batched_tokens: int
    policies: Policies = Policies()  # noqa: RUF009 - a frozen value

    @property
    def engine(self) -> Engine:
        """As the simulator takes it."""
        return Engine(
            timing=self.candidate.estimate.timing,
            kv_capacity_tokens=self.candidate.estimate.kv_capacity_tokens,
            kv_block_size=self.policies.kv_block_size,
            batching=self.batching,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            order=self.policies.order,
            prefill_sched_batch=self.policies.prefill_sched_batch,
            admission=self.policies.admission,
        )

    def limited(self, max_num_seqs: int, max_num_batched_tokens: int) -> "Instance":
        """The same with other limits of a pass."""
        return replace(
            self, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        )


def candidates(problem: Problem) -> tuple[Candidate, ...]:
    """All that fit, by kind of GPU, tensor and pipeline parallel size."""
    return tuple(
        Candidate(supply, Parallelism(tensor=tensor, pipeline=pipeline), estimate)
        for supply in problem.supplies
        for tensor, pipeline in sizes(problem, supply)
        if (estimate := problem.estimator.estimate(supply.gpu, tensor, pipeline)) is not None
    )


def sizes(problem: Problem, supply: Supply) -> list[tuple[int, int]]:
    """Tensor and pipeline parallel sizes that the nodes have room for."""
    nodes = min(problem.max_nodes_per_instance, supply.num_nodes)
    max_gpus = min(problem.max_gpus, supply.max_gpus)
    return [
        (tensor, pipeline)
        for tensor in range(1, supply.gpus_per_node + 1)
        # A stage lies in one node; stages share nodes as far as there is room.
        for pipeline in range(1, nodes * (supply.gpus_per_node // tensor) + 1)
        if tensor * pipeline <= max_gpus
    ]


def by_gpu(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """Kind of GPU -> its candidates.

    Groups of nodes with the same kind would only repeat each other's.
    """
    kinds: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        of_kind = kinds.setdefault(candidate.supply.gpu, [])
        if all(other.parallelism != candidate.parallelism for other in of_kind):
            of_kind.append(candidate)
    return kinds


def prefill_instance(problem: Problem, candidate: Candidate) -> Instance:
    """Prompts up to L_m in one pass (DistServe, section 4.3), or as vLLM chunks them.

    A budget below vLLM's default would only cut prompts: its engines do not gain by smaller passes.
    """
    saturation = candidate.estimate.prefill_saturation_tokens
    budget = (
        saturation
        if problem.policies.prefill is Batching.PREFILL_FIRST
        else max(saturation, MAX_NUM_BATCHED_TOKENS)
    )
    return _instance(problem, candidate, problem.policies.prefill, budget)


def decode_instance(problem: Problem, candidate: Candidate) -> Instance:
    """Continuous batching of all that fits."""
    instance = _instance(problem, candidate, problem.policies.decode, MAX_NUM_BATCHED_TOKENS)
    stages = candidate.parallelism.pipeline
    return instance.limited(DECODE_NUM_SEQS * stages, instance.max_num_batched_tokens)


def mixed_instance(problem: Problem, candidate: Candidate, batching: Batching) -> Instance:
    """Both phases on one instance."""
    return _instance(problem, candidate, batching, MAX_NUM_BATCHED_TOKENS)


def _instance(problem: Problem, candidate: Candidate, batching: Batching, budget: int) -> Instance:
    return Instance(
        candidate=candidate,
        batching=batching,
        max_num_seqs=MAX_NUM_SEQS * candidate.parallelism.pipeline,
        max_num_batched_tokens=budget,
        policies=problem.policies,
    )
