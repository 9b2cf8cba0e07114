"""What the planner answers: ranked plans, their predictions, and the verdict in words.

Made by the search, read by the command line, the report, `cleave up` and the operator. Values only.
"""

from dataclasses import dataclass
from enum import StrEnum

from cleave.api.role import Parallelism, Role
from cleave.perf.trust import Trust

EMULATED_GPU = "emulated GPU"
"""The kind of GPU of an emulated instance, which needs none."""


class Verdict(StrEnum):
    """The answer in a word."""

    DISAGGREGATE = "Disaggregate"
    COLOCATE = "Colocate"
    INFEASIBLE = "Infeasible"


@dataclass(frozen=True, slots=True)
class PlannedPool:
    """The instances of one role."""

    role: Role
    replicas: int
    parallelism: Parallelism = Parallelism()  # noqa: RUF009 - a frozen value
    gpu: str | None = None
    """Kind of GPU; None: whatever the nodes have."""
    batching: str | None = None
    """Name of the simulator's Batching that the prediction assumes; None: not predicted."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    per_cell: int | None = None
    """Instances in a cell, whose equal pipeline stages share a node; None: they may be anywhere."""

    @property
    def gpus(self) -> int:
        """GPUs (on CPU nodes: cores) of the whole pool."""
        return self.replicas * self.parallelism.gpus


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of one latency over all requests, in milliseconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator says of one plan."""

    goodput: float
    """Highest rate (req/s) of all its GPUs at which the SLO holds."""
    goodput_interval: tuple[float, float]
    """95 % confidence interval of `goodput`, from simulations with other seeds."""
    attainment: float
    """Share of requests that meet both targets at the rate that was asked for."""
    ttft_ms: Percentiles
    """At the rate that was asked for, as all that follow."""
    tpot_ms: Percentiles
    cost_per_hour: float
    power_watts: float
    """Provisioned, all GPUs."""
    trust: Trust
    """How far the latency model behind it can be trusted."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to serve the deployment."""

    pools: tuple[PlannedPool, ...]
    """At most one per role, in the order prefill, decode, mixed."""
    prediction: Prediction
    algorithm: str
    """How it was found: `Algorithm 1`, `Algorithm 2`, `colocated`."""
    score: float
    """The objective: goodput per GPU, per price of an hour, or per watt."""
    is_gpu_chosen: bool = False
    """Whether there were several kinds of GPU to choose from, so that labels name them."""
    whole_below_tokens: int = 0
    """Prompts up to so long may be computed where they are decoded; 0: none."""
    ahead_from_tokens: int = 0
    """Prompts from so many on gain by a transfer per layer; 0: none do."""

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return sum(pool.gpus for pool in self.pools)

    @property
    def goodput_per_gpu(self) -> float:
        """Predicted goodput by GPU, in req/s."""
        return self.prediction.goodput / self.gpus

    @property
    def is_disaggregated(self) -> bool:
        """Whether prefill has instances of its own."""
        return any(pool.role is Role.PREFILL for pool in self.pools)


@dataclass(frozen=True, slots=True)
class NearestSlo:
    """The tightest SLO, scaled from the one asked for, that some plan can hold."""

    scale: float
    """Both targets times this."""
    ttft_ms: float
    tpot_ms: float
    plan: str
    """The plan that holds it, in words."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything the planner has to say about one deployment."""

    verdict: Verdict
    selected: Plan | None
    """None when infeasible."""
    alternatives: tuple[Plan, ...]
    """Best first, the selected one left out; the best colocated and the best disaggregated plan
    are always in `selected` or here when they exist."""
    reason: str
    """One sentence: why this plan, or why none."""
    what_would_change: str
    """One sentence: the runner-up, and what would make it the choice."""
    nearest_slo: NearestSlo | None
    """Only when infeasible."""
    warnings: tuple[str, ...]
    """Diagnoses of the workload and of the latency model."""
    num_candidates: int
    num_simulated_requests: int
    elapsed_s: float

    @property
    def best(self) -> Plan | None:
        """The selected plan, else the best of the others; None: there are none."""
        return self.selected or next(iter(self.alternatives), None)
