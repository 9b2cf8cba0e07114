"""Every parallelism that one instance can have on the available GPUs, and its engine.

The loops of DistServe's Algorithm 1 (section 4.1): tensor parallel sizes within a node, pipeline
stages across nodes; the estimator says which of them fit. Models with experts also get
data-parallel ranks with expert parallelism, and expert parallelism of one engine. What is hard:
their number. Sizes that others dominate are left out: uneven shares of the experts; slices of
experts over ranks, which cost what whole experts do, and exchange more; pipeline stages of ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from cleave.api.deployment import Slo
from cleave.api.planning import Objective
from cleave.api.pool import MAX_INSTANCE_NODES
from cleave.api.role import MAX_PARALLEL_SIZE, MAX_POD_ENGINES, MAX_RANKS, Parallelism, Role
from cleave.perf.estimate import Estimate
from cleave.perf.hardware.memory import NO_ROOM
from cleave.planner.problem import Policies, Problem, Supply
from cleave.simulator.fleet import Batching, SimulatedEngine

MAX_NUM_SEQS = 256
"""vLLM's default limit of requests per step, where the search has set no other."""
DECODE_MAX_NUM_SEQS = 1024
"""The limit on decode instances, where memory and the TPOT target bound the batch."""
MAX_NUM_BATCHED_TOKENS = 2048
"""vLLM's default token budget for online serving."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The model on one GPU type with one parallelism."""

    supply: Supply
    parallelism: Parallelism
    estimate: Estimate

    @property
    def gpus(self) -> int:
        """GPUs of one instance."""
        return self.parallelism.gpus

    def get_resources(self, objective: Objective) -> float:
        """Resources of one instance in the unit of the objective: GPUs, price of an hour, watts."""
        match objective:
            case Objective.COST:
                return self.estimate.cost_per_hour
            case Objective.POWER:
                return self.estimate.power_watts
            case Objective.GOODPUT_PER_GPU:
                return float(self.gpus)


@dataclass(frozen=True, slots=True)
class PlannedInstance:
    """A candidate together with the batching of its engine."""

    candidate: Candidate
    batching: Batching
    max_num_seqs: int
    max_num_batched_tokens: int
    policies: Policies
    slo: Slo

    @property
    def engine(self) -> SimulatedEngine:
        """The engine in the simulator's type."""
        estimate, host_gib = self.candidate.estimate, self.policies.kv_offloading_gib or 0
        return SimulatedEngine(
            timing=estimate.timing,
            kv_capacity_tokens=estimate.kv_capacity_tokens,
            kv_block_size=self.policies.kv_block_size,
            batching=self.batching,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            order=self.policies.order,
            prefill_sched_batch=self.policies.prefill_sched_batch,
            admission=self.policies.admission,
            ttft_ms=self.slo.ttft_ms,
            tpot_ms=self.slo.tpot_ms,
            ranks=self.candidate.parallelism.data,
            host_capacity_tokens=(host_gib << 30) // estimate.kv_bytes_per_token,
            host_token_ms=estimate.host_token_ms,
            prefix_caching=self.policies.prefix_caching,
        )

    def with_supply(self, supply: Supply) -> "PlannedInstance":
        """The same on other nodes."""
        return replace(self, candidate=replace(self.candidate, supply=supply))

    def with_limits(
        self, seqs: int | None = None, batched_tokens: int | None = None
    ) -> "PlannedInstance":
        """A copy with other limits per step (None: the same), but those that arguments set."""
        given = self.policies
        return replace(
            self,
            max_num_seqs=given.max_num_seqs or seqs or self.max_num_seqs,
            max_num_batched_tokens=(
                given.max_num_batched_tokens or batched_tokens or self.max_num_batched_tokens
            ),
        )


def list_candidates(problem: Problem) -> tuple[Candidate, ...]:
    """All candidates that fit, by GPU type, tensor and pipeline parallel size; then those whose
    ranks or GPUs share experts."""
    return tuple(
        Candidate(supply, size, estimate)
        for supply in problem.supplies
        for size in list_sizes(problem, supply)
        if (estimate := estimate_size(problem, supply.gpu, size)) is not None
    )


def estimate_size(problem: Problem, gpu: str, size: Parallelism) -> Estimate | None:
    """The estimate of instances of this size; None: they are not supported."""
    return problem.estimator.estimate(
        gpu, size.tensor, size.pipeline, size.data, expert=size.expert
    )


def explain_unsupported(problem: Problem, gpu: str, size: Parallelism) -> str | None:
    """Why instances of this size are not supported, in one sentence; None: they are."""
    return problem.estimator.explain_unsupported(
        gpu, size.tensor, size.pipeline, size.data, expert=size.expert
    )


def list_short_of_room(problem: Problem) -> Iterator[str]:
    """A line for each GPU type with sizes that are left out because they have no room for the KV of
    the longest request."""
    for supply in {each.gpu: each for each in problem.supplies}.values():
        sizes = list_sizes(problem, supply)
        reasons = (explain_unsupported(problem, supply.gpu, size) for size in sizes)
        short = [reason for reason in reasons if reason and NO_ROOM in reason]
        if short:
            others = f"; so it is with {len(short) - 1} other sizes" if len(short) > 1 else ""
            yield f"left out: {short[0]}{others}; a smaller spec.model.maxModelLen needs less"


def list_sizes(problem: Problem, supply: Supply) -> list[Parallelism]:
    """Sizes for which the nodes have room: tensor and pipeline parallel ones, then those whose
    ranks or GPUs share experts."""
    nodes = min(problem.max_nodes_per_instance, supply.num_nodes)
    max_gpus = min(problem.max_gpus, supply.max_gpus)
    plain = [
        Parallelism(tensor=tensor, pipeline=pipeline)
        for tensor in range(1, supply.gpus_per_node + 1)
        # A stage lies in one node; several stages may share a node.
        for pipeline in range(1, nodes * (supply.gpus_per_node // tensor) + 1)
        if tensor * pipeline <= max_gpus and max(tensor, pipeline) <= MAX_PARALLEL_SIZE
    ]
    return plain + _list_expert_sizes(problem, supply)


def _list_expert_sizes(problem: Problem, supply: Supply) -> list[Parallelism]:
    """Sizes with expert parallelism, over GPUs that divide the experts evenly: within a node, or
    over whole nodes with equally many ranks. None for models without experts."""
    experts = problem.shape.experts
    if experts is None:
        return []
    per_node = supply.gpus_per_node
    nodes = min(supply.num_nodes, MAX_INSTANCE_NODES)
    most = min(problem.max_gpus, supply.max_gpus, nodes * per_node, experts.count)
    return [
        Parallelism(tensor=tensor, data=gpus // tensor, expert=True)
        for gpus in range(2, most + 1)
        if experts.count % gpus == 0 and (gpus <= per_node or gpus % per_node == 0)
        for tensor in range(1, min(gpus, per_node) + 1)
        if per_node % tensor == 0
        and gpus % tensor == 0
        and gpus // tensor <= MAX_RANKS
        and min(gpus, per_node) // tensor <= MAX_POD_ENGINES
    ]


def group_by_gpu(candidates: Sequence[Candidate]) -> dict[str, list[Candidate]]:
    """GPU type -> its candidates; sizes that occur in several groups of nodes are listed once."""
    kinds: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        of_kind = kinds.setdefault(candidate.supply.gpu, [])
        if all(other.parallelism != candidate.parallelism for other in of_kind):
            of_kind.append(candidate)
    return kinds


def build_prefill(problem: Problem, candidate: Candidate) -> PlannedInstance:
    """An instance that computes prompts up to L_m per step (DistServe, section 4.3), or as vLLM
    chunks them.

    The budget is not below vLLM's default: its engines do not gain by smaller chunks.
    """
    budget = candidate.estimate.prefill_saturation_tokens
    if problem.policies.prefill is not Batching.PREFILL_FIRST:
        budget = max(budget, MAX_NUM_BATCHED_TOKENS)
    return _build_instance(problem, candidate, Role.PREFILL, problem.policies.prefill, budget)


def build_decode(problem: Problem, candidate: Candidate) -> PlannedInstance:
    """An instance that decodes all requests that fit, by continuous batching."""
    batching, budget = problem.policies.decode, MAX_NUM_BATCHED_TOKENS
    instance = _build_instance(problem, candidate, Role.DECODE, batching, budget)
    return instance.with_limits(DECODE_MAX_NUM_SEQS * candidate.parallelism.pipeline)


def build_mixed(problem: Problem, candidate: Candidate, batching: Batching) -> PlannedInstance:
    """An instance that serves both phases."""
    return _build_instance(problem, candidate, Role.MIXED, batching, MAX_NUM_BATCHED_TOKENS)


def _build_instance(
    problem: Problem, candidate: Candidate, role: Role, batching: Batching, budget: int
) -> PlannedInstance:
    return PlannedInstance(
        candidate=candidate,
        batching=batching,
        max_num_seqs=MAX_NUM_SEQS * candidate.parallelism.pipeline,
        max_num_batched_tokens=budget,
        policies=problem.policies.for_role(role),
        slo=problem.slo,
    ).with_limits()
