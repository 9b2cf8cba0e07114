"""What a plan is to optimise, and within which limits."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from cleave.api.shape import Shape, keyed_by


class Mode(StrEnum):
    """What becomes of plans."""

    AUTO = "Auto"
    ADVISORY = "Advisory"
    MANUAL = "Manual"


class Objective(StrEnum):
    """What the best plan has most of."""

    GOODPUT_PER_GPU = "GoodputPerGPU"
    COST = "Cost"
    """Goodput per price of an hour."""
    POWER = "Power"
    """Goodput per provisioned watt."""


class Affinity(StrEnum):
    """Which of DistServe's placement algorithms is used."""

    AUTO = "Auto"
    HIGH = "High"
    LOW = "Low"


class Disaggregation(StrEnum):
    """Whether prefill and decode may, must or must not be separate."""

    AUTO = "Auto"
    ALWAYS = "Always"
    NEVER = "Never"


class Replanning(StrEnum):
    """Whether plans follow traffic."""

    OFF = "Off"
    ADVISORY = "Advisory"
    AUTO = "Auto"


class Replan(Shape):
    """Plans while traffic moves away from what they were made for."""

    mode: Annotated[Replanning, Field(strict=False)] = Replanning.AUTO
    """Auto: another plan is applied where it pays, as far as planning.mode is Auto; what is placed
    by hand stays. Advisory: it is only told, by Events and in status.advice. Off: traffic is not
    watched, and what was planned once stays."""
    interval_s: Annotated[int, Field(ge=10, le=86_400)] = 300
    """Seconds between two looks at whether the plan is still right, and at least so long from one
    plan to the next."""
    min_gain: Annotated[float, Field(ge=0, le=10)] = 0.1
    """Least gain for which instances are changed: requests within both targets, or GPUs saved, as a
    share of what there is."""
    drift_threshold: Annotated[float, Field(gt=0, le=10)] = 0.3
    """Largest error of the planner's prediction for what runs, as a share of what was seen, with
    which it is trusted to change it; above, its latency model is corrected first."""


class GpuChoice(Shape):
    """One kind of GPU that the plan may use."""

    type: Annotated[str, Field(min_length=1, max_length=128)]
    """Name in the catalogue or in the cluster's own list."""
    max: Annotated[int, Field(ge=1)] | None = None
    """Most GPUs of this kind; absent: all there are."""
    price_per_hour: Annotated[float, Field(ge=0)] | None = None
    """Price of one GPU for an hour, in any currency; absent: the catalogue's."""
    power_cap_watts: Annotated[float, Field(gt=0)] | None = None
    """Power limit of one GPU; prefill slows down under it."""


class Planning(Shape):
    """How the planner chooses."""

    mode: Annotated[Mode, Field(strict=False)] = Mode.AUTO
    """Auto: the best plan is applied; a placement by hand comes before it. Advisory: it is only
    told in status.advice, and what runs stays. Manual: spec.placement is all there is."""
    objective: Annotated[Objective, Field(strict=False)] = Objective.GOODPUT_PER_GPU
    """GoodputPerGPU, Cost (requests per price) or Power (requests per watt)."""
    affinity: Annotated[Affinity, Field(strict=False)] = Affinity.AUTO
    """High: prefill and decode anywhere (DistServe's Algorithm 1). Low: the same pipeline stage of
    both in one node (Algorithm 2). Auto: what the network between nodes allows."""
    disaggregation: Annotated[Disaggregation, Field(strict=False)] = Disaggregation.AUTO
    """Auto: where it pays. Always, Never: without asking."""
    max_gpus: Annotated[int | None, Field(ge=1, alias="maxGPUs")] = None
    """Most GPUs of the whole deployment; absent: all of the cluster."""
    gpus: Annotated[list[GpuChoice], keyed_by("type")] = Field(default_factory=list, max_length=16)
    """Kinds of GPU that may be used; absent: every kind in the cluster."""
    replan: Replan = Replan()
    """How plans follow traffic, in a cluster."""
