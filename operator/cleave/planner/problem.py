"""What is to be planned: a model, its traffic and targets, and the GPUs that there are.

Made by hand (tests, benchmarks, notebooks) or by `cleave.planner.asking` from a deployment and a
cluster. Values only; every part of the search takes a `Problem`.
"""

from dataclasses import dataclass

from cleave.api.deployment import Slo
from cleave.api.engine import Connector
from cleave.api.planning import Planning
from cleave.api.role import Parallelism
from cleave.perf.estimate import Estimator
from cleave.perf.link import Link
from cleave.perf.model import ModelShape
from cleave.simulator.fleet import Admission, Batching, Order
from cleave.traffic.workload import Demand


@dataclass(frozen=True, slots=True)
class Supply:
    """Nodes that are alike."""

    gpu: str
    """Kind of GPU, as the estimator knows it."""
    num_nodes: int
    gpus_per_node: int
    max_gpus: int
    """Most GPUs that a plan may take of these nodes."""
    node_link: Link
    """What KV takes between instances of one node: the GPUs' own link only where the instances'
    processes can map each other's GPU memory; pods cannot, so theirs is the network's."""
    network_link: Link
    """What KV takes between instances of unlike nodes."""


@dataclass(frozen=True, slots=True)
class Policies:
    """How the engines batch. The defaults are those of the engines that Cleave runs."""

    prefill: Batching = Batching.VLLM
    decode: Batching = Batching.VLLM
    mixed: tuple[Batching, ...] = (Batching.VLLM,)
    """Tried one by one; Vidur's search tries several (section 6)."""
    first_token_by_decode: bool = True
    """False: as the DistServe paper counts."""
    dispatch_ms: float = 0.0
    """Client to instance, as in `simulator.fleet.Fleet`."""
    kv_block_size: int = 16
    order: Order = Order.FCFS
    """Of waiting prompts."""
    prefill_sched_batch: int = 16
    """The oldest prompts that SJF and LJF sort at a time."""
    admission: Admission = Admission.GREEDY
    """Of requests that decode."""
    connector: Connector = Connector.NIXL
    """What limits which parallel sizes can be paired."""


PAPER = Policies(
    prefill=Batching.PREFILL_FIRST,
    mixed=(Batching.PREFILL_FIRST,),
    first_token_by_decode=False,
)
"""What DistServe (OSDI'24) and the vLLM that it was compared with did."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One question to the planner."""

    demand: Demand
    slo: Slo
    supplies: tuple[Supply, ...]
    shape: ModelShape
    """The model; what its hand-offs weigh."""
    estimator: Estimator
    planning: Planning = Planning()  # noqa: RUF009 - a frozen value
    policies: Policies = Policies()
    max_nodes_per_instance: int = 4
    """Algorithm 1's node limit N."""
    seed: int = 0
    notes: tuple[str, ...] = ()
    """What whoever asks has to say of the workload or the model; passed on with the answer."""

    @property
    def max_gpus(self) -> int:
        """Most GPUs of the whole plan."""
        available = sum(supply.max_gpus for supply in self.supplies)
        limit = self.planning.max_gpus
        return available if limit is None else min(available, limit)

    def can_pair(self, prefill: Parallelism, decode: Parallelism) -> bool:
        """Whether decode instances of this size can take KV from prefill instances of that one."""
        connector, heads = self.policies.connector, self.shape.split_kv_heads
        return connector.why_not(prefill, decode, heads) is None

    @property
    def rate(self) -> float:
        """Requests per second to plan for."""
        return self.demand.rate
