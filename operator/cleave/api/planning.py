"""What a plan optimizes, and within which limits."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from cleave.api.base import ApiModel, ValidationRule, declare_list_map_key

MAX_GPUS = 100_000
"""Most GPUs of one deployment: each one that a plan uses is simulated."""

MAX_PRIORITY = 1_000_000_000
"""As of Kubernetes' PriorityClass."""


class PlanningMode(StrEnum):
    """Whether plans are applied."""

    AUTO = "Auto"
    ADVISORY = "Advisory"
    MANUAL = "Manual"


class Objective(StrEnum):
    """What the best plan maximizes."""

    GOODPUT_PER_GPU = "GoodputPerGPU"
    COST = "Cost"
    """Goodput per price of one hour."""
    POWER = "Power"
    """Goodput per provisioned watt."""


class Affinity(StrEnum):
    """Which of DistServe's placement algorithms is used."""

    AUTO = "Auto"
    HIGH = "High"
    LOW = "Low"


class Disaggregation(StrEnum):
    """Whether prefill and decode may, must or must not run on separate instances."""

    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


class ReplanMode(StrEnum):
    """Whether plans are revised when traffic changes."""

    OFF = "Off"
    ADVISORY = "Advisory"
    AUTO = "Auto"


class ReplanSpec(ApiModel):
    """How plans are revised when traffic differs from the planned traffic."""

    mode: Annotated[ReplanMode, Field(strict=False)] = ReplanMode.AUTO
    """Auto: another plan is applied when it is better by minGain, provided that planning.mode is
    Auto; manual placements stay. Advisory: the other plan is only reported, by Events and in
    status.advice. Off: traffic is not observed, and the first plan stays."""
    interval_s: Annotated[int, Field(ge=10, le=86_400)] = 300
    """Seconds between two reviews of the plan, and the minimum time between two plans."""
    min_gain: Annotated[float, Field(ge=0, le=10)] = 0.1
    """Minimum gain for which instances are changed: requests that meet both targets, or GPUs saved,
    as a share of the present number."""
    drift_threshold: Annotated[float, Field(gt=0, le=10)] = 0.3
    """Largest relative error of the planner's prediction for the running plan with which it may
    change that plan. With a larger error its latency model is corrected first."""


class GpuChoice(ApiModel):
    """A kind of GPU that the plan may use."""

    type: Annotated[str, Field(min_length=1, max_length=128)]
    """Name of the GPU in the catalogue or in the cluster's own list."""
    max: Annotated[int, Field(ge=1, le=MAX_GPUS)] | None = None
    """Maximum number of GPUs of this kind; absent: all in the cluster."""
    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    """Price of one GPU for one hour in US dollars; absent: the catalogue's price."""
    power_cap_watts: Annotated[float, Field(gt=0)] | None = None
    """Power limit of one GPU in watts, with which prefill is slower."""


class Planning(ApiModel):
    """How the planner chooses a plan."""

    mode: Annotated[PlanningMode, Field(strict=False)] = PlanningMode.AUTO
    """Auto: the best plan is applied, unless spec.placement gives a manual one. Advisory: the plan
    is only reported in status.advice, and instances stay as they are. Manual: nothing is planned;
    spec.placement applies."""
    objective: Annotated[Objective, Field(strict=False)] = Objective.GOODPUT_PER_GPU
    """What the plan maximizes: GoodputPerGPU (requests per GPU), Cost (requests per price) or Power
    (requests per watt)."""
    affinity: Annotated[Affinity, Field(strict=False)] = Affinity.AUTO
    """High: prefill and decode instances are placed anywhere (DistServe's Algorithm 1). Low: their
    equal pipeline stages share a node (Algorithm 2). Auto: what the network between nodes
    allows."""
    disaggregation: Annotated[Disaggregation, Field(strict=False)] = Disaggregation.AUTO
    """Auto: prefill and decode are separated where the plan is better for it. Always; Never."""
    max_gpus: Annotated[int | None, Field(ge=1, le=MAX_GPUS, alias="maxGPUs")] = None
    """Maximum number of GPUs of the deployment; absent: all in the cluster."""
    min_gpus: Annotated[int | None, Field(ge=0, le=MAX_GPUS, alias="minGPUs")] = None
    """GPUs that no other deployment takes. In a cluster, instances above that number are lent to
    deployments of higher priority while these need their GPUs; one of each role always stays.
    Absent: none are lent."""
    priority: Annotated[int | None, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = None
    """Whose GPUs the deployment may borrow, in a cluster: those that deployments of lower priority
    lend. Absent: 0."""
    gpus: list[GpuChoice] = declare_list_map_key("type", default_factory=list, max_length=16)
    """Kinds of GPU that the plan may use; absent: every kind in the cluster."""
    acceptance_length: Annotated[float, Field(ge=1, le=64)] | None = None
    """Mean number of tokens that a decode iteration emits with --speculative-config in engine.args,
    which vLLM logs as the mean acceptance length; absent: plans count with 1."""
    replan: ReplanSpec = ReplanSpec()
    """How plans are revised when traffic changes, in a cluster."""

    rules = (
        ValidationRule(
            cel="!has(self.minGPUs) || !has(self.maxGPUs) || self.minGPUs <= self.maxGPUs",
            is_valid=lambda p: p.min_gpus is None or p.min_gpus <= (p.max_gpus or MAX_GPUS),
            message="must not exceed maxGPUs: lower it, or raise maxGPUs",
            field="minGPUs",
        ),
    )
