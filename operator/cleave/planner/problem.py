"""The input of the planner: a model, its traffic and targets, and the available GPUs.

Built directly (tests, benchmarks, notebooks) or by `cleave.planner.problem_from_cluster` from a
deployment and a cluster. Value classes only; every part of the search takes a `Problem`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from cleave.api.deployment import LLMDeploymentSpec, Slo
from cleave.api.engine import NO_PREFIX_CACHING, Connector, DeploymentEngine, EngineSpec
from cleave.api.enums import DispatchPolicy, FlippingMode
from cleave.api.planning import Planning
from cleave.api.role import Parallelism, Role
from cleave.api.scheduling import DecodeAdmission, PromptOrder, RoleLimits
from cleave.perf.estimate import Estimator
from cleave.perf.hardware.link import Link
from cleave.perf.model.model_shape import ModelShape
from cleave.planner import memory_flags
from cleave.policy.role_flipping import FlipThresholds, build_thresholds
from cleave.simulator.fleet import Admission, Batching, PrefillOrder
from cleave.traffic.workload import Demand

ORDERS = {
    PromptOrder.ARRIVAL: PrefillOrder.FCFS,
    PromptOrder.SHORTEST_FIRST: PrefillOrder.SJF,
    PromptOrder.LONGEST_FIRST: PrefillOrder.LJF,
    PromptOrder.IN_TIME_FIRST: PrefillOrder.IN_TIME,
}
ADMISSIONS = {
    DecodeAdmission.GREEDY: Admission.GREEDY,
    DecodeAdmission.RESERVE_STATIC: Admission.RESERVE_STATIC,
    DecodeAdmission.RESERVE_DYNAMIC: Admission.RESERVE_DYNAMIC,
    DecodeAdmission.WITHIN_TPOT: Admission.WITHIN_TPOT,
}


@dataclass(frozen=True, slots=True)
class Supply:
    """A group of equal nodes."""

    gpu: str
    """GPU type, as the estimator knows it."""
    num_nodes: int
    gpus_per_node: int
    max_gpus: int
    """Most GPUs of these nodes that a plan may use."""
    node_link: Link
    """Link for KV between instances on one node. It is the GPUs' own link only where the instances'
    processes can map each other's GPU memory; pods cannot, so for them it is the network."""
    network_link: Link
    """Link for KV between instances on different nodes."""
    cell_link: Link | None = None
    """Link for KV between the instances of a cell that has room on one node, and is one pod there:
    the GPUs' own link. None: `node_link`."""


@dataclass(frozen=True, slots=True)
class Policies:
    """How the engines batch, and how requests reach them. The defaults are those of the engines and
    gateways that Cleave starts."""

    prefill: Batching = Batching.VLLM
    decode: Batching = Batching.VLLM
    mixed: tuple[Batching, ...] = (Batching.VLLM,)
    """The search tries each of them; Vidur's search tries several (section 6)."""
    first_token_by_decode: bool = True
    """Whether the decode instance produces the first token. False: as in the DistServe paper."""
    dispatch_ms: float = 0.0
    """Latency from client to instance, as in `simulator.fleet.SimulatedFleet`."""
    kv_block_size: int = 16
    order: PrefillOrder = PrefillOrder.FCFS
    """Order of waiting prompts."""
    prefill_sched_batch: int = 16
    """Number of oldest prompts that SJF and LJF sort at a time."""
    admission: Admission = Admission.GREEDY
    """How decode instances admit requests."""
    dispatch: DispatchPolicy = DispatchPolicy.PREFIX_AWARE
    """How gateways pick the instances of a request."""
    connector: Connector = Connector.CLEAVE
    """KV connector; it limits which parallel sizes can be paired."""
    kv_offloading_gib: int | None = None
    """Host memory of an instance for KV; None: it has none."""
    prefix_caching: bool = True
    """Whether engines cache prefixes."""
    max_num_seqs: int | None = None
    """Limit of requests per step of all engines; None: the search chooses them."""
    max_num_batched_tokens: int | None = None
    """The same of tokens per step."""
    role_limits: tuple[RoleLimits, ...] = ()
    """Both limits of each role, where its engines have arguments of their own; empty: as above."""
    flipping: FlipThresholds | None = None
    """When gateways change the roles of instances; None: roles are fixed."""

    def for_role(self, role: Role) -> "Policies":
        """The policies of the engines of one role."""
        for own in self.role_limits:
            if own.role is role:
                seqs, tokens = own.max_num_seqs, own.max_num_batched_tokens
                return replace(self, max_num_seqs=seqs, max_num_batched_tokens=tokens)
        return self


DISTSERVE_POLICIES = Policies(
    prefill=Batching.PREFILL_FIRST,
    mixed=(Batching.PREFILL_FIRST,),
    first_token_by_decode=False,
    connector=Connector.NIXL,
    prefix_caching=False,
)
"""Settings of DistServe (OSDI'24) and of the vLLM version that it was compared with."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One planning task: what to serve, within which SLO, on which nodes."""

    demand: Demand
    slo: Slo
    supplies: tuple[Supply, ...]
    shape: ModelShape
    """Dimensions of the model; they set the size of its KV transfers."""
    estimator: Estimator
    planning: Planning = Planning()  # noqa: RUF009 - a frozen value
    policies: Policies = Policies()
    max_nodes_per_instance: int = 4
    """Node limit N of DistServe's Algorithm 1."""
    seed: int = 0
    notes: tuple[str, ...] = ()
    """Warnings of the caller about the workload or the model; copied to the result."""

    @property
    def max_gpus(self) -> int:
        """Most GPUs that the plan may use in total."""
        available = sum(supply.max_gpus for supply in self.supplies)
        limit = self.planning.max_gpus
        return available if limit is None else min(available, limit)

    def divide(self, parts: int, rounded: Callable[[float], int]) -> "Problem":
        """The problem of one of so many equal parts of the GPUs, at its share of the rate.
        `rounded`: what becomes of its share of the nodes."""
        demand = self.demand.with_rate(self.rate / parts)
        most = self.planning.max_gpus
        update = {"max_gpus": None if most is None else most // parts}
        supplies = tuple(
            replace(e, num_nodes=rounded(e.num_nodes / parts), max_gpus=e.max_gpus // parts)
            for e in self.supplies
        )
        planning = self.planning.model_copy(update=update)
        return replace(self, supplies=supplies, demand=demand, planning=planning)

    def can_pair(self, prefill: Parallelism, decode: Parallelism) -> bool:
        """Whether decode instances of this size can pull KV from prefill instances of that size."""
        connector, heads = self.policies.connector, self.shape.shardable_kv_heads
        return connector.explain_incompatibility(prefill, decode, heads) is None

    @property
    def rate(self) -> float:
        """Requests per second to plan for."""
        return self.demand.rate


def limit_reuse(demand: Demand, engine: EngineSpec) -> Demand:
    """The demand as these engines meet it: without prefix caches, no prompt repeats for them."""
    return demand.without_reuse() if engine.has_flag(NO_PREFIX_CACHING) else demand


def build_policies(spec: LLMDeploymentSpec) -> Policies:
    """The policies of spec.routing, spec.engine.scheduling and spec.engine.args, else vLLM's
    defaults; what they do not contain is listed by `left_out.describe`. Raises PlanError."""
    engine, scheduling, pools = spec.engine, spec.engine.scheduling, spec.pools
    flipping = build_thresholds(spec.slo.ttft_ms, pools.min_prefill, pools.min_decode)
    given = Policies(
        dispatch=spec.routing.policy,
        connector=engine.kv_connector,
        kv_offloading_gib=engine.kv_offloading_gib,
        kv_block_size=memory_flags.read_count(engine, memory_flags.BLOCK_SIZE) or 16,
        prefix_caching=not engine.has_flag(NO_PREFIX_CACHING),
        max_num_seqs=memory_flags.read_count(engine, memory_flags.SEQS),
        max_num_batched_tokens=memory_flags.read_count(engine, memory_flags.BATCHED_TOKENS),
        role_limits=tuple(_read_limits(engine, role) for role in Role if engine.roles),
        flipping=flipping if spec.flipping is FlippingMode.AUTO else None,
    )
    if scheduling is None:
        return given
    return replace(
        given,
        order=ORDERS[scheduling.order],
        prefill_sched_batch=scheduling.sorted_prompts,
        admission=ADMISSIONS[scheduling.admission],
    )


def _read_limits(engine: DeploymentEngine, role: Role) -> RoleLimits:
    own = engine.for_role(role)
    return RoleLimits(
        role=role,
        max_num_seqs=memory_flags.read_count(own, memory_flags.SEQS),
        max_num_batched_tokens=memory_flags.read_count(own, memory_flags.BATCHED_TOKENS),
    )
