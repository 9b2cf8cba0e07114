"""The result of planning: ranked plans, their predictions, and the verdict in words.

Built by `cleave.planner.plan_search`; read by the command line, the report, `cleave up` and the
operator. Value classes only.
"""

from dataclasses import dataclass
from enum import StrEnum

from cleave.api.role import Parallelism, Role
from cleave.perf.estimate import Confidence
from cleave.perf.hardware.link import LinkKind

EMULATED_GPU = "emulated GPU"
"""Name of the GPU type of an emulated instance, which needs no GPU."""


LOW_AFFINITY = "Algorithm 2"
"""Prefix of `Plan.algorithm` where cells have a pipeline stage of all instances in one node."""


WIDE_ERROR = 0.01
"""An attainment that is known less well is shown with its error."""


class PlanVerdict(StrEnum):
    """Whether to disaggregate, to colocate, or that no plan meets the SLO."""

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
    """GPU type; None: any GPU of the nodes."""
    batching: str | None = None
    """Name of the simulator's `Batching` that the prediction assumes; None: not predicted."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    per_cell: int | None = None
    """Instances per cell (a group whose equal pipeline stages share a node); None: no cells,
    instances may run anywhere."""

    @property
    def gpus(self) -> int:
        """GPUs (on CPU nodes: cores) of all instances of the pool."""
        return self.replicas * self.parallelism.gpus


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of one latency over all requests, in milliseconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class PlannedKvLink:
    """The link over which a plan assumes that KV is transferred."""

    kind: LinkKind
    gb_per_s: float
    """Rate at which one GPU of a decode instance receives KV, in gigabytes per second."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the simulator predicts for one plan."""

    goodput: float
    """Highest rate (req/s) that all GPUs together serve within the SLO."""
    goodput_interval: tuple[float, float]
    """95 % confidence interval of `goodput`, from simulations with other seeds."""
    attainment: float
    """Share of requests that meet both targets at the requested rate; of the selected plan the mean
    over several samples of requests."""
    ttft_ms: Percentiles
    """At the requested rate, like all following fields."""
    tpot_ms: Percentiles
    itl_ms: Percentiles
    """Of all times between tokens (inter-token latency, ITL): TPOT is a request's mean of them."""
    cost_per_hour: float
    power_watts: float
    """Provisioned power of all GPUs."""
    trust: Confidence
    """How reliable the latency model behind the prediction is."""
    kv_link: PlannedKvLink | None = None
    """None: no KV is transferred."""
    cached_share: float = 0.0
    """Share of prompt tokens found in prefix caches; 0 where no prompts are known to repeat."""
    ttft_attainment: float = 1.0
    """Share of requests that meet the TTFT target, whatever their TPOT."""
    tpot_attainment: float = 1.0
    attainment_error: float = 0.0
    """Half of the 95 % confidence interval of `attainment`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One set of pools that serves the deployment."""

    pools: tuple[PlannedPool, ...]
    """At most one per role, in the order prefill, decode, mixed."""
    prediction: Prediction
    algorithm: str
    """The algorithm that found the plan: `Algorithm 1`, `Algorithm 2`, `search.colocated`."""
    score: float
    """Value of the objective: served rate per GPU, per price of an hour, or per watt."""
    cells: int = 1
    """Equal cells into which the pools are divided; one is simulated at its share of the rate."""
    is_gpu_chosen: bool = False
    """Whether there were several GPU types to choose from, so that labels name them."""
    whole_below_tokens: int = 0
    """Prompts of up to this many tokens may be computed on the decode instance; 0: none."""
    ahead_from_tokens: int = 0
    """Prompts of at least this many tokens gain from a layer-wise KV transfer; 0: none do."""
    max_model_len: int | None = None
    """Tokens of the longest request for which all instances have room, where that is less than the
    deployment's limit; None: its own."""

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return sum(pool.gpus for pool in self.pools)

    @property
    def goodput_per_gpu(self) -> float:
        """Predicted goodput per GPU, in req/s."""
        return self.prediction.goodput / self.gpus

    @property
    def is_disaggregated(self) -> bool:
        """Whether the plan has prefill instances."""
        return any(pool.role is Role.PREFILL for pool in self.pools)


@dataclass(frozen=True, slots=True)
class NearestSlo:
    """The tightest SLO, scaled from the requested one, that some plan meets."""

    scale: float
    """Factor on the targets that are longer than the requested ones."""
    ttft_ms: float
    tpot_ms: float
    itl_p99_ms: float | None
    """None: none was requested."""
    plan: str
    """Description of the plan that meets it."""


@dataclass(frozen=True, slots=True)
class ReuseWorth:
    """What prompts that repeat save."""

    cached_share: float
    """Share of prompt tokens that the selected plan finds in prefix caches."""
    gpus: int
    """GPUs of the selected plan."""
    gpus_without: int | None
    """GPUs of the best plan if no prompt repeated; None: none would meet the SLO."""
    text: str
    """One sentence."""


@dataclass(frozen=True, slots=True)
class PlanningResult:
    """The complete result of planning one deployment."""

    verdict: PlanVerdict
    selected: Plan | None
    """None when no plan meets the SLO."""
    alternatives: tuple[Plan, ...]
    """Best first, without the selected plan. The best colocated and the best disaggregated plan are
    always in `selected` or here when they exist."""
    reason: str
    """One sentence: why this plan, or why there is none."""
    what_would_change: str
    """One sentence: the runner-up, and what would make it the selected plan."""
    nearest_slo: NearestSlo | None
    """Only when no plan meets the SLO."""
    warnings: tuple[str, ...]
    """Warnings about the workload and the latency model."""
    num_candidates: int
    num_simulated_requests: int
    elapsed_s: float
    reuse: ReuseWorth | None = None
    """None: no prompts are known to repeat, or no plan was selected."""

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All plans, the selected one first."""
        return (self.selected, *self.alternatives) if self.selected else self.alternatives

    @property
    def best(self) -> Plan | None:
        """The selected plan, else the first alternative; None: there is no plan."""
        return next(iter(self.plans), None)
