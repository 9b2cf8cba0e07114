"""What was seen of a deployment's traffic, and what became of its plans. Parts of its status.

Written by `cleave.controller.loop`, which also reads it back: an operator that starts anew goes on
from what is told here.
"""

from datetime import datetime
from typing import Annotated

from pydantic import Field

from cleave.api.planned import LatencyPercentiles, ManualPool, NonNegative
from cleave.api.shape import Shape
from cleave.api.workload import Workload

Factor = Annotated[float, Field(ge=0.1, le=10)]


class SeenLengths(Shape):
    """Of prompts or outputs, in tokens."""

    mean: NonNegative
    """Mean."""
    p90: NonNegative | None = None
    """90th percentile; absent: not known."""


class SeenTraffic(Shape):
    """The traffic of the last minutes, as the gateways counted it."""

    at: Annotated[datetime, Field(strict=False)]
    """When this was written."""
    window_s: NonNegative
    """Seconds that it speaks of."""
    rate: NonNegative
    """Requests per second."""
    prompt_tokens: SeenLengths | None = None
    """Prompt lengths; absent: no request ended."""
    output_tokens: SeenLengths | None = None
    """Output lengths; absent: no request ended."""
    attainment: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of requests that met both targets; absent: none was judged."""
    ttft_ms: LatencyPercentiles | None = None
    """Time to first token; absent: no stream began."""
    tpot_ms: LatencyPercentiles | None = None
    """Time per output token after the first; absent: no stream ended."""


class SeenPrediction(Shape):
    """What the planner predicts for what runs, at the traffic that was seen."""

    at: Annotated[datetime, Field(strict=False)]
    """When it was compared."""
    attainment: Annotated[float, Field(ge=0, le=1)]
    """Share of requests that meet both targets."""
    ttft_ms: LatencyPercentiles | None = None
    """Time to first token; absent: too little was seen to compare."""
    tpot_ms: LatencyPercentiles | None = None
    """Time per output token after the first; absent: too little was seen to compare."""
    error: NonNegative | None = None
    """Largest difference from what was seen, as a share of that; absent: nothing to compare."""


class LatencyCorrection(Shape):
    """By what the passes are multiplied that the planner takes from its latency model."""

    prefill: Factor = 1.0
    """Passes that compute prompts."""
    decode: Factor = 1.0
    """Passes that generate tokens."""
    num_requests: Annotated[int, Field(ge=0)] = 0
    """Requests that it rests on."""
    of: str
    """Digest of model, engine and kinds of GPU: for others it says nothing."""


class PlanBasis(Shape):
    """What the plan rests on instead of what the spec states."""

    workload: Workload
    """The traffic that it was made for, fitted to what was seen."""
    correction: LatencyCorrection | None = None
    """That of the latency model which it was made with; absent: none."""
    of: str
    """Digest of the traffic that the spec states: when that changes, it is planned for."""


class PastPlan(Shape):
    """What came of a look at whether the plan is still right."""

    at: Annotated[datetime, Field(strict=False)]
    """When."""
    verdict: str
    """Applied, Proposed or Corrected."""
    reason: str
    """Why."""
    pools: list[ManualPool] = Field(default_factory=list, max_length=3)
    """Instances of the plan, by role; absent: there was none."""
    left: list[ManualPool] = Field(default_factory=list, max_length=3)
    """Instances of the plan that it took the place of; absent: of none."""
